"""kill -9 at random moments: every script, one rank and two, in every phase of an iteration.

    python -m tests.kills --model CHECKPOINT --folder FOLDER --tries 14

A try kills a run, perhaps once more after its resume, resumes it and compares metrics, episodes and
weights with those of a run that nobody killed. Prints a line for each and what was lost.
"""

import os
import random
import runpy
import shutil
import signal
import subprocess
import sys
import time

import psutil
import tyro

from tests.conftest import ROOT, SMALL, differences, start_run

SHORT = [*SMALL, "--num-iterations", "4", "--save-every", "1", "--eval-every", "2"]
NO_K = [word for i, word in enumerate(SHORT) if "--k" not in SHORT[max(0, i - 1) : i + 1]]
EVAL = ["--eval-problems", "10", "--eval-rounds", "2", "--minibatch-size", "4"]
RESTEM = ["--num-prompts", "8", "--group-size", "16", "--num-iterations", "2"]
DPO = ["--num-prompts", "4", "--group-size", "16", "--max-pairs", "8", "--update-epochs", "4"]
SCRIPTS = {
    "vineppo.py": SHORT,
    "ppo.py": NO_K,
    "grpo.py": NO_K,
    "rloo.py": NO_K,
    "restem.py": [*EVAL, *RESTEM, "--update-epochs", "2", "--eval-every", "3"],
    "dpo_pos.py": [*EVAL, *DPO, "--save-every", "3", "--eval-every", "4"],
    "sft.py": ["--num-epochs", "0.01", "--save-every", "4", "--eval-every", "5"],
}


def start(words: list[str], ranks: int, phases: str) -> subprocess.Popen:
    """The script, with the phases that it goes through written to a file."""
    return start_run(["-m", "tests.kills", *words], ranks, PHASES=phases)


def finish(words: list[str], ranks: int, phases: str = os.devnull) -> str:
    process = start(words, ranks, phases)
    output, _ = process.communicate()
    assert process.returncode == 0, output[-4000:]
    return output


def resume(folder: str) -> list[str]:
    """What a user adds to the command, where there is a run to go on with."""
    return ["--resume", "auto"] if os.path.exists(f"{folder}/args.json") else []


def run_script(words: list[str]) -> None:
    """In the process of a run: its script, with a mark at the start of each phase. END_AT, say
    "SIGTERM rollouts 2", sends rank 0 that signal when that phase begins for the second time."""
    from common import run

    set_phase, seen = run.Run.phase, []
    end, end_phase, times = os.environ.get("END_AT", "none none 0").split()

    def phase(self, name: str) -> None:
        set_phase(self, name)
        if self.is_main:
            seen.append(name)
            with open(os.environ["PHASES"], "a") as file:
                file.write(f"{time.time()} {name or 'log'}\n")
            if name == end_phase and seen.count(name) == int(times):
                os.kill(os.getpid(), signal.Signals[end])

    run.Run.phase = phase
    sys.argv = words
    sys.path[0] = ROOT
    runpy.run_path(os.path.join(ROOT, words[0]), run_name="__main__")


def kill_all(process: subprocess.Popen) -> None:
    """torchrun's ranks too, which are no members of its process group: the ranks first."""
    for child in psutil.Process(process.pid).children(recursive=True):
        child.kill()
    process.kill()
    process.communicate()


def read_phases(path: str) -> list[tuple[float, str]]:
    if not os.path.exists(path):
        return []
    with open(path) as file:
        lines = [line.split() for line in file if line.endswith("\n")]
    return [(float(seconds), name) for seconds, name in lines]


def kill(words: list[str], ranks: int, phases: str, number: int, delay: float) -> str | None:
    """Starts the run, kills its processes `delay` seconds after its phase `number` began; says
    which phase it was in, None where the run was over before."""
    if os.path.exists(phases):
        os.remove(phases)
    process = start(words, ranks, phases)
    while len(read_phases(phases)) <= number and process.poll() is None:
        time.sleep(0.005)
    time.sleep(delay)
    if process.poll() is not None:
        output, _ = process.communicate()
        assert process.returncode == 0, output[-4000:]
        return None
    kill_all(process)
    return read_phases(phases)[-1][1]


def main(model: str, folder: str, tries: int = 14, seed: int = 1, first: int = 0) -> None:
    """`first`: where to begin, to go on with a trial that was stopped (7: those on two ranks)."""
    rng = random.Random(seed + first)
    wholes: dict[tuple[str, int], list[tuple[float, str]]] = {}
    lost = 0
    for number in range(first, tries):
        script = list(SCRIPTS)[number % len(SCRIPTS)]
        ranks = 1 + number // len(SCRIPTS) % 2
        words = [script, *SCRIPTS[script]]
        if script != "sft.py":
            words += ["--model", model]
        whole = os.path.join(folder, f"{script}-{ranks}")
        if (script, ranks) not in wholes:
            finish([*words, "--output-dir", whole], ranks, f"{whole}.phases")
            wholes[script, ranks] = read_phases(f"{whole}.phases")
        phases = wholes[script, ranks]
        killed = os.path.join(folder, f"try{number}")
        words += ["--output-dir", killed]
        where: list[str | None] = [None]
        while None in where:  # it was faster than the run that nobody killed: once more
            shutil.rmtree(killed, ignore_errors=True)
            where = []
            for again in range(1 + number % 2):
                # of two kills the first in the first half, the second soon after the resume
                early = phases[: 6 if again else len(phases) // (1 + number % 2) - 1]
                names = sorted({name for _, name in early})
                name = names[(number + seed) % len(names)]
                which = rng.choice([i for i, (_, other) in enumerate(early) if other == name])
                delay = rng.random() * (phases[which + 1][0] - phases[which][0])
                line = [*words, *resume(killed)]
                where.append(kill(line, ranks, f"{killed}.phases", which, delay))
        finish([*words, *resume(killed)], ranks)
        found = differences(killed, whole)
        lost += bool(found)
        print(
            f"{number + 1}: {script}, {ranks} rank(s), killed in {' and '.join(where)}: "
            f"{'the same to the bit' if not found else 'NOT THE SAME: ' + ', '.join(found)}",
            flush=True,
        )
    print(f"{tries - first} tries, {tries - first - lost} the same, {lost} not")


if __name__ == "__main__":
    if "PHASES" in os.environ:
        run_script(sys.argv[1:])
    else:
        tyro.cli(main)
