"""`make demo`: the embedded task from nothing to a trained model, with the commands that it runs.

SFT where there is no checkpoint yet, pass@1 on held-out problems, vineppo.py with fewer rollouts
and more iterations than its defaults (better in the same time here), pass@1 again, the curve.
"""

import json
import os
import subprocess
import sys
import time

import torch
import tyro

import sft
from analysis.curves import draw_curves
from common import require

SFT = "runs/sft"
SETTINGS = ["--k", "3", "--num-iterations", "40"]


def make_launcher() -> list[str]:
    """torchrun with one rank for each GPU; without one, two ranks where there are two cores."""
    ranks = torch.cuda.device_count() or min(2, os.cpu_count() or 1)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // ranks)))
    torchrun = os.path.join(os.path.dirname(sys.executable), "torchrun")
    return [torchrun, "--standalone", "--nproc-per-node", str(ranks)]


def sft_folder(seed: int) -> str:
    return SFT if seed == 1 else f"{SFT}-seed{seed}"


def make_sft(launcher: list[str], *seeds: int) -> None:
    """The seeds' SFT checkpoints with sft.py's defaults, unless they are there; goes on with half a
    one. Raises UsageError where one of other settings is there."""
    for seed in seeds:
        folder = sft_folder(seed)
        if not os.path.exists(f"{folder}/finished"):
            resume = "auto" if os.path.exists(f"{folder}/args.json") else "no"
            options = ["--output-dir", folder, "--seed", str(seed), "--resume", resume]
            call(launcher, "sft.py", *options)
        with open(f"{folder}/args.json") as file:
            made = json.load(file)
        for name in ("seed", "num_epochs", "batch_size", "learning_rate"):
            flag, wanted = name.replace("_", "-"), getattr(sft.Args(seed=seed), name)
            require(
                made[name] == wanted,
                f"{folder} was made with --{flag} {made[name]}, not {wanted}: move it away",
            )


def call(launcher: list[str], *arguments: str) -> None:
    print(f"\n$ {os.path.relpath(launcher[0])} {' '.join([*launcher[1:], *arguments])}", flush=True)
    if code := subprocess.call([*launcher, *arguments]):
        sys.exit(code)


def main(seed: int = 1) -> None:
    torchrun = make_launcher()
    folder = f"runs/demo-{time.strftime('%Y%m%d-%H%M%S')}"

    def evaluate(model: str, output: str) -> dict:
        call(torchrun, "evaluate.py", "--model", model, "--output", output)
        with open(output) as file:
            return json.load(file)

    make_sft(torchrun, seed)
    model = f"{sft_folder(seed)}/hf"
    before = evaluate(model, f"{folder}/before.json")
    start = time.time()
    train = ["--seed", str(seed), "--model", model, "--output-dir", f"{folder}/train"]
    call(torchrun, "vineppo.py", *train, *SETTINGS)
    seconds = time.time() - start
    after = evaluate(f"{folder}/train/hf", f"{folder}/after.json")
    with open(f"{folder}/train/metrics.jsonl") as file:
        iterations = len(file.readlines())
    draw_curves(f"{folder}/train", f"{folder}/curve.png", {0: before, iterations: after})
    print(f"\nresponses, step by step: {folder}/train/episodes.jsonl; curve: {folder}/curve.png")
    print(
        f"pass@1 (test, {len(after['scores'])} problems, {after['rounds']} rounds): "
        f"{before['pass@1']:.3f} -> {after['pass@1']:.3f} in {iterations} iterations, "
        f"{seconds:.0f} s"
    )


if __name__ == "__main__":
    tyro.cli(main)
