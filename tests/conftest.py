"""What the tests share: one short SFT checkpoint, and commands as users type them."""

import filecmp
import json
import os
import shutil
import subprocess
import sys

import filelock
import pytest

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
BIN = os.path.dirname(sys.executable)

# An iteration of about a second: 4 x 4 responses, minibatches of 8, 3 rollouts a state.
SMALL = ["--num-prompts", "4", "--group-size", "4", "--minibatch-size", "8", "--k", "3"]
SMALL += ["--eval-problems", "10", "--eval-rounds", "2", "--eval-every", "2"]


def command(*arguments: str, ranks: int = 1) -> list[str]:
    """`python ...` for one rank, `torchrun ... ` for more; "-m name" is a module."""
    if ranks == 1:
        return [sys.executable, *arguments]
    return [f"{BIN}/torchrun", "--standalone", "--nproc-per-node", str(ranks), *arguments]


def quiet_environment(ranks: int = 1) -> dict[str, str]:
    """The environment without the variables that `ranks.set_up` leaves in this process."""
    own = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    environment = {name: value for name, value in os.environ.items() if name not in own}
    threads = os.environ.get("TEST_THREADS", "2") if ranks == 1 else "1"
    return {**environment, "OMP_NUM_THREADS": threads}


def call(*arguments: str, ranks: int = 1, fails: bool = False) -> subprocess.CompletedProcess:
    result = subprocess.run(
        command(*arguments, ranks=ranks),
        cwd=ROOT,
        env=quiet_environment(ranks),
        capture_output=True,
        text=True,
    )
    assert (result.returncode != 0) == fails, result.stdout[-3000:] + result.stderr[-6000:]
    return result


def start_run(arguments, ranks: int, output=subprocess.PIPE, **variables) -> subprocess.Popen:
    """As `call`, without waiting; in a session of its own."""
    return subprocess.Popen(
        command(*arguments, ranks=ranks),
        cwd=ROOT,
        env={**quiet_environment(ranks), **variables},
        stdout=output,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def call_many(commands: list[list[str]]) -> list[tuple[int, str, str]]:
    """(exit status, stdout, stderr) of each, in forks of one process that has imported much."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.commands"],
        input=json.dumps(commands),
        cwd=ROOT,
        env=quiet_environment(),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")


def open_page(path, *options: str) -> str:
    """The page as a browser has it in the end, its scripts done."""
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run"]
    command += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
    command += [f"--user-data-dir={path.parent / 'profile'}", "--virtual-time-budget=2000"]
    command += [*options, "--dump-dom", path.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, timeout=900).stdout


def copy_of_the_project(folder):
    """Copies the files of the work tree that git does not ignore."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.check_output(listed, cwd=ROOT, text=True).split("\0")
    for name in (name for name in names if os.path.isfile(f"{ROOT}/{name}")):
        os.makedirs(os.path.dirname(folder / name), exist_ok=True)
        shutil.copy(f"{ROOT}/{name}", folder / name)
    return folder


def read_jsonl(path) -> list[dict]:
    with open(path) as file:
        return [json.loads(line) for line in file]


def timeless(path) -> list[dict]:
    """metrics.jsonl without its timings."""
    return [
        {name: value for name, value in line.items() if not name.startswith("time/")}
        for line in read_jsonl(path)
    ]


def differences(folder, whole) -> list[str]:
    """What differs between two runs: metrics (without timings), episodes, the last weights."""
    found = []
    if timeless(f"{folder}/metrics.jsonl") != timeless(f"{whole}/metrics.jsonl"):
        found.append("metrics")
    if os.path.exists(f"{whole}/episodes.jsonl") and (
        read_jsonl(f"{folder}/episodes.jsonl") != read_jsonl(f"{whole}/episodes.jsonl")
    ):
        found.append("episodes")
    weights = "hf/model.safetensors"
    if not filecmp.cmp(f"{folder}/{weights}", f"{whole}/{weights}", shallow=False):
        found.append("weights")
    return found


# What takes an engine, or a checkpoint that one has made; or many seconds.
SLOW = {"sft_model", "recorded", "replayed", "finished", "faults", "second", "ppo_run"}
SLOW |= {"results", "probed"}


# Files of 20 seconds and more come first, so that two processes end at about the same time.
LONG = "runs", "second", "replays", "given", "errors", "sampler", "values", "data"


def pytest_collection_modifyitems(items):
    for item in items:
        if SLOW & {*item.fixturenames}:
            item.add_marker(pytest.mark.slow)
    order = {f"test_{name}": i for i, name in enumerate(LONG)}
    items.sort(key=lambda item: order.get(item.path.stem, len(LONG)))


SHORT_SFT = ["--num-epochs", "0.064", "--batch-size", "16", "--eval-every", "0"]  # embedded task


@pytest.fixture(scope="session")
def sft_model(tmp_path_factory) -> str:
    """From a little SFT: enough for some rewards. SFT_MODEL: one that was made before. Of processes
    that test at a time one makes it."""
    if "SFT_MODEL" in os.environ:
        return os.environ["SFT_MODEL"]
    shared = tmp_path_factory.getbasetemp()
    shared = shared.parent if "PYTEST_XDIST_WORKER" in os.environ else shared
    with filelock.FileLock(shared / "sft.lock"):
        if not (shared / "sft/finished").exists():
            call("sft.py", *SHORT_SFT, "--output-dir", str(shared / "sft"))
    return str(shared / "sft/hf")


@pytest.fixture(scope="session")
def recorded(sft_model, tmp_path_factory):
    """All scripts on one rank, one after another, and what they sampled."""
    folder = tmp_path_factory.mktemp("replay")
    arguments = ["--folder", str(folder), "--model", sft_model]
    call("-m", "tests.replay", "--record", *arguments)
    return folder, arguments
