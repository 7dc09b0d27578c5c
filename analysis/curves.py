"""Learning curves of runs as a PNG: mean reward of the samples and pass@1 on held-out problems.

python -m analysis.curves runs/vineppo-chain-seed1 --output curves.png
"""

import json
import os
from typing import Annotated

import matplotlib
import tyro

from common import require

matplotlib.use("Agg")
from matplotlib import pyplot as plt


def read_metrics(run: str) -> list[dict]:
    path = os.path.join(run, "metrics.jsonl")
    require(os.path.exists(path), f"{path}: no such file; {run} is not the folder of a run")
    with open(path) as file:
        return [json.loads(line) for line in file]


def draw_curves(run: str, output: str, test: dict[int, dict] | None = None) -> None:
    """`test`: results of evaluate.py (pass@1 and its interval) by iteration."""
    lines = read_metrics(run)
    rewards = [line for line in lines if "rollout/reward" in line]
    require(rewards, f"{run} has no rewards: name a run of an RL script, not of sft.py")
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    axes.plot(
        [line["iteration"] for line in rewards],
        [line["rollout/reward"] for line in rewards],
        ".-",
        color="#999999",
        label="mean reward of the sampled responses",
    )
    validation = [line for line in lines if "eval/pass@1" in line]
    axes.plot(
        [line["iteration"] for line in validation],
        [line["eval/pass@1"] for line in validation],
        "s--",
        color="#0072b2",
        label="pass@1, validation problems",
    )
    if test:
        low, high = zip(*(test[i]["interval"] for i in test), strict=True)
        middle = [test[i]["pass@1"] for i in test]
        errors = [
            [m - b for m, b in zip(middle, low, strict=True)],
            [t - m for m, t in zip(middle, high, strict=True)],
        ]
        axes.errorbar(
            list(test),
            middle,
            errors,
            fmt="o",
            capsize=4,
            color="#d55e00",
            label="pass@1, test problems (95 % interval)",
        )
    axes.set(xlabel="iteration", ylabel="share of right answers", ylim=(0, 1))
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.savefig(output, dpi=150)
    plt.close(figure)


def main(run: Annotated[str, tyro.conf.Positional], output: str = "curves.png") -> None:
    draw_curves(run, output)
    print(output)


if __name__ == "__main__":
    tyro.cli(main)
