"""`make demo`: the embedded task from nothing to a trained model, with the commands that it runs.

SFT where there is no checkpoint yet, pass@1 on held-out problems, vineppo.py with its defaults,
pass@1 again, the curve as a PNG.
"""

import json
import os
import subprocess
import sys
import time

import torch
import tyro

from analysis.curves import draw_curves

SFT = "runs/sft"


def main(seed: int = 1, script: str = "vineppo.py") -> None:
    """One rank for each GPU; without one, two ranks where there are two cores."""
    ranks = torch.cuda.device_count() or min(2, os.cpu_count() or 1)
    torchrun = [os.path.join(os.path.dirname(sys.executable), "torchrun"), "--standalone"]
    torchrun += ["--nproc-per-node", str(ranks)]
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // ranks)))
    folder = f"runs/demo-{time.strftime('%Y%m%d-%H%M%S')}"

    def run(*arguments: str) -> None:
        command = [*torchrun, *arguments]
        print(f"\n$ {os.path.relpath(command[0])} {' '.join(command[1:])}", flush=True)
        if code := subprocess.call(command):
            sys.exit(code)

    def evaluate(model: str, output: str) -> dict:
        run("evaluate.py", "--model", model, "--output", output)
        with open(output) as file:
            return json.load(file)

    if not os.path.exists(f"{SFT}/finished"):
        started = os.path.exists(f"{SFT}/args.json")
        run("sft.py", "--output-dir", SFT, "--resume", "auto" if started else "no")
    before = evaluate(f"{SFT}/hf", f"{folder}/before.json")
    start = time.time()
    run(script, "--seed", str(seed), "--model", f"{SFT}/hf", "--output-dir", f"{folder}/train")
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
