"""Plants mistakes in copies of the project, one at a time, and sees which test notices.

    python -m tests.mutants                     all of tests/planted.py; prints `killed N of N`
    python -m tests.mutants --only "learning rate"    those whose description or file has this text
    python -m tests.mutants --patch FILE        a change of your own, a unified diff

For each the tests that should notice run, the quick ones first, until one fails. The tests that
compare texts (side by side, README) do not count: they notice any change. A test that kills must
pass in a copy without the mistake.
"""

import contextlib
import ctypes
import importlib
import multiprocessing
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

# One thread for each process, since several run at a time; before anything imports torch.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import psutil
import tyro

from tests.conftest import ROOT, SHORT_SFT, copy_of_the_project
from tests.planted import PLANTED, Planted
from tests.record import RUNS

TIME_LIMIT = 3600  # seconds for a stage: a mistake may make processes wait for one another
PR_SET_CHILD_SUBREAPER = 36

OURS = ("tests", "common", "given", "tasks", "mathequal", "experiments", "analysis", "recipes")

# A stage is `second NAME`, the second computation of a run, or arguments of pytest.
MATHS, STEPS, DATA = (f"tests/test_{name}.py" for name in ("math", "steps", "data"))
GRADING, ERRORS = (f"tests/test_{name}.py" for name in ("grading", "errors"))
GIVEN = "tests/test_given.py -m 'not slow and not soak'"
RUNNING, REPLAYS = (f"tests/test_{name}.py" for name in ("runs", "replays"))
MATHS += " -k 'not memory'"
WITHOUT_ENGINES = "checkpoint_stays or damaged_checkpoint or disk or discarded or norm or may or "
WITHOUT_ENGINES += "digests or"
FOLDER = f"{RUNNING} -k '{WITHOUT_ENGINES} another_runs or callers'"
TWO_RANKS, PARITY = f"{REPLAYS} -k two_ranks_make", "tests/test_sampler.py"
FAULTS = f"{REPLAYS} -k 'exploded or broken_numbers or trains_no_model or forgets'"
SIGTERMS = [f"{RUNNING} -k terminated", "tests/test_soak.py -k one_rank"]
PARITIES = [PARITY, "tests/test_soak.py -k one_sampler"]
SEED = "tests/test_soak.py -k initial_weights"
FUNCTIONS = [MATHS, "tests/test_allocation.py"]  # what stands above `main` is tested by numbers
EQUAL = ["tests/test_mathequal.py"]
FORKS = [f"experiments/{name}.py" for name in ("trees", "vineppo_tree", "vineppo_unsure")]
ENGINES = [FAULTS, PARITY, DATA, ERRORS]
STAGES = {f"{name}.py": [f"second {name}", TWO_RANKS, FAULTS, SIGTERMS[0]] for name in RUNS}
STAGES |= {
    "experiments/vineppo_cheap.py": ["tests/test_allocation.py", "second vineppo_cheap"],
    **{fork: ["tests/test_forks.py -m 'not soak'"] for fork in FORKS},
    "common/ranks.py": [MATHS, "second vineppo", TWO_RANKS, PARITY],
    "common/batches.py": [MATHS, "second vineppo", TWO_RANKS],
    "common/engines.py": [MATHS, GIVEN, FOLDER, "second vineppo", "second sft", *ENGINES],
    "common/sampling.py": [STEPS, MATHS, "second vineppo_cheap", "second evaluate", *PARITIES],
    "common/checkpoints.py": [FOLDER, "second ppo"],
    "common/run.py": [FOLDER, GIVEN, "second vineppo", "second sft", FAULTS, *SIGTERMS],
    "common/flags.py": [FOLDER, ERRORS],
    "common/steps.py": [STEPS, "second vineppo"],
    "common/data.py": [DATA, GIVEN, "second sft", "second evaluate"],
    "common/grading.py": [GRADING, "second vineppo"],
    "sft.py": [DATA, "second sft", TWO_RANKS, SEED],
    "given/model.py": [GIVEN, ERRORS],
    "given/weights.py": [GIVEN],
    "given/chat.py": [GIVEN],
    "given/folder.py": [GIVEN],
    "tasks/chain.py": [DATA],
    "tasks/own.py": [DATA],
    "tasks/jsonl.py": [DATA, ERRORS],
    "tasks/mathematics.py": [DATA],
    "tasks/sentences.py": [STEPS],
    "mathequal/boxes.py": EQUAL,
    "mathequal/numbers.py": [GRADING],
    "mathequal/process.py": EQUAL,
}
SCRIPTS = {f"{name}.py" for name in RUNS}
# Minutes each, for what lives till then.
LAST = [
    FAULTS,
    *FUNCTIONS,
    f"{REPLAYS} -m 'not soak'",
    f"{RUNNING} -m 'not soak'",
    ERRORS,
    DATA,
    SIGTERMS[1],
    PARITIES[1],
    SEED,
]
EVERYTHING = [*FUNCTIONS, STEPS, DATA, GRADING, *EQUAL, *(f"second {name}" for name in RUNS), *LAST]
EVERYTHING += [f"tests/test_{name}.py" for name in ("fuzz", "values", "analysis", "plan", "fork")]


def set_up(temporary: str) -> None:
    """Of a process that judges: it imports what its children need, and makes what they start from.
    It has one thread: a fork of another could inherit a lock that nobody opens."""
    os.environ |= {"DS_ACCELERATOR": "cpu", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    os.environ |= {"TORCH_COMPILE_DISABLE": "1", "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64"}
    os.environ |= {"VLLM_LOGGING_LEVEL": "ERROR", "DS_LOG_LEVEL": "error", "TEST_THREADS": "1"}
    names = ("deepspeed", "pytest", "torch.utils.tensorboard", "transformers", "vllm", "hypothesis")
    for name in (*names, "vllm.v1.worker.cpu_worker"):
        importlib.import_module(name)
    ctypes.CDLL("libc.so.6").prctl(PR_SET_CHILD_SUBREAPER, 1)  # orphans come to it, to be ended
    global judge
    judge = Judge(Path(temporary))


def in_a_child(folder: str, words: list[str], output: str, **variables: str) -> bool:
    """Whether the words (a module of ours, or arguments of pytest) succeed there."""
    child = os.fork()
    if child == 0:
        file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, 1)
        os.dup2(file, 2)
        os.chdir(folder)
        os.environ |= variables
        sys.path[:] = [folder, *(path for path in sys.path if path not in ("", ROOT))]
        for name in [name for name in sys.modules if name.split(".")[0] in OURS]:
            del sys.modules[name]
        status = 1
        try:
            if words[0] == "record":
                from tests import record

                record.main(words[1], runs=tuple(words[2:]))
                status = 0
            else:
                import pytest

                status = pytest.main([*words, "-q", "-x", "-rfE", "-p", "no:cacheprovider"])
        except BaseException:
            sys.excepthook(*sys.exc_info())
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    deadline = time.monotonic() + TIME_LIMIT
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done or time.monotonic() > deadline:
            break
        time.sleep(0.05)
    if not done:
        with open(output, "a") as file:
            file.write(f"\nFAILED: it hangs for {TIME_LIMIT} seconds\n")
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, 0)[0]:
            pass
    return bool(done) and status == 0


def read_failure(output: str) -> str:
    """The test that failed, or the last line of what did not run."""
    with open(output, errors="replace") as file:
        text = file.read()
    failed = re.findall(r"^(?:FAILED|ERROR):? (.*)$", text, re.MULTILINE)
    return failed[0][:150] if failed else f"the run: {text.strip().splitlines()[-1][:120]}"


def find_failure_of(stage: str, folder: str, start: str) -> str:
    """Which test of the stage fails in this copy; "" where none does. `start`: what `make_start`
    has made."""
    output, name = os.path.join(folder, "stage.log"), stage.removeprefix("second ")
    variables = {"SFT_MODEL": os.path.join(start, "short_sft/hf")}
    if name != stage:
        recorded = os.path.join(folder, "runs/recorded")
        shutil.rmtree(recorded, ignore_errors=True)
        shutil.copytree(start, recorded, symlinks=True)
        if not in_a_child(folder, ["record", recorded, name], output):
            return f"{stage}: {read_failure(output)}"
        variables["RECORDED"] = recorded
        stage = f"tests/test_second.py -k [{name}]"
    passes = in_a_child(folder, shlex.split(stage), output, **variables)
    return "" if passes else read_failure(output)


class Judge:
    """Says which test fails in a copy, and has seen its stage pass in a copy without a mistake."""

    def __init__(self, temporary: Path):
        self.start, self.passing = str(temporary / "start"), set()
        self.whole = copy_of_the_project(Path(tempfile.mkdtemp(dir=temporary)))

    def find_killer(self, folder: Path, stages: list[str]) -> str:
        """The first test of the stages that fails; "" where none does."""
        for stage in stages:
            failure = find_failure_of(stage, str(folder), self.start)
            if failure and stage not in self.passing:
                without = find_failure_of(stage, str(self.whole), self.start)
                assert not without, f"fails without a mistake: {without}"
                self.passing.add(stage)
            if failure:
                return failure
        return ""

    def find_killer_of(self, one: Planted, stages: list[str]) -> str:
        folder = copy_of_the_project(Path(tempfile.mkdtemp(dir=os.path.dirname(self.start))))
        text = (folder / one.file).read_text()
        (folder / one.file).write_text(text.replace(one.old, one.new))
        killer = self.find_killer(folder, stages)
        shutil.rmtree(folder)
        verdict = f"killed by {killer}" if killer else "lives so far"
        print(f"{one.file}: {one.what}: {verdict}", flush=True)
        return killer


def find_quick_killer(one: Planted) -> str:
    before, _, _ = (Path(ROOT) / one.file).read_text().partition(one.old)
    is_function = one.file in SCRIPTS and "\ndef main(" not in before
    return judge.find_killer_of(one, FUNCTIONS * is_function + STAGES[one.file])


def find_late_killer(one: Planted) -> str:
    return judge.find_killer_of(one, LAST)


def find_killer_of_patch(patch: str) -> str:
    with open(patch) as file:
        touched = re.findall(r"^\+\+\+ b/(\S+)", file.read(), re.MULTILINE)
    folder = copy_of_the_project(Path(tempfile.mkdtemp(dir=os.path.dirname(judge.start))))
    subprocess.check_call(["patch", "--strip", "1", "--input", patch], cwd=folder)
    stages = [stage for file in touched for stage in STAGES.get(file, [])]
    return judge.find_killer(folder, [*dict.fromkeys([*stages, *EVERYTHING])])


def read_planted(only: str) -> list[Planted]:
    chosen = [one for one in PLANTED if only in f"{one.file}: {one.what}"]
    for one in chosen:
        times = (Path(ROOT) / one.file).read_text().count(one.old)
        assert times == 1, f"{one.file} has {times} of {one.old!r}: mend tests/planted.py"
    return chosen


def make_starts(temporary: str) -> None:
    """Two checkpoints: for the recorded runs, and for the other tests."""
    start = os.path.join(temporary, "start")
    make = f"from tests.record import make_start; make_start({start!r})"
    subprocess.check_call([sys.executable, "-c", make], cwd=ROOT)
    sft = ["sft.py", *SHORT_SFT, "--output-dir", os.path.join(start, "short_sft")]
    subprocess.check_call([sys.executable, *sft], cwd=ROOT)


def main(only: str = "", patch: str = "", jobs: int = 2) -> None:
    """`jobs`: how many at a time."""
    chosen = read_planted(only)
    with tempfile.TemporaryDirectory() as temporary:
        make_starts(temporary)
        shared = os.path.join(os.path.dirname(ROOT), "shared")
        if os.path.exists(shared):  # data that some tests read, where it lies beside the project
            os.symlink(shared, os.path.join(temporary, "shared"))
        fork = multiprocessing.get_context("fork")
        with fork.Pool(1 if patch else jobs, set_up, [temporary]) as pool:
            if patch:
                killer = pool.apply(find_killer_of_patch, [os.path.abspath(patch)])
                print(f"killed by {killer}" if killer else "lives: no test notices")
                sys.exit(0 if killer else 1)
            killers = pool.map(find_quick_killer, chosen, chunksize=1)
            left = [i for i, killer in enumerate(killers) if not killer]
            late = pool.map(find_late_killer, [chosen[i] for i in left], chunksize=1)
    for i, killer in zip(left, late, strict=True):
        killers[i] = killer
    print(f"killed {sum(map(bool, killers))} of {len(chosen)}")
    for one, killer in zip(chosen, killers, strict=True):
        if not killer:
            print(f"lives: {one.file}: {one.what}")
    sys.exit(0 if all(killers) else 1)


if __name__ == "__main__":
    tyro.cli(main)
