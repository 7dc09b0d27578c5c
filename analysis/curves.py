"""Learning curves of runs as a PNG: mean reward of the samples and pass@1 on held-out problems.

python -m analysis.curves runs/vineppo-chain-seed1 --output curves.png
python -m analysis.curves runs/grpo-gsm8k runs/vineppo-gsm8k        side by side, by minutes
"""

import json
import math
import os
import statistics
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


def read_rewards(run: str) -> list[dict]:
    """The metrics of an RL script's run. Raises UsageError for one without rewards."""
    lines = read_metrics(run)
    has_rewards = any("rollout/reward" in line for line in lines)
    require(has_rewards, f"{run} has no rewards: name a run of an RL script, not of sft.py")
    return lines


def training_seconds(line: dict) -> float:
    """Of an iteration, without checkpoints and evaluation. RestEM's evaluations count: they decide
    when it stops."""
    apart = ("time/save",) if "walk/evaluations" in line else ("time/save", "time/evaluate")
    return line["time/iteration"] - sum(line.get(name, 0) for name in apart)


def draw_curves(run: str, output: str, test: dict[int, dict] | None = None) -> None:
    """`test`: results of evaluate.py (pass@1 and its interval) by iteration."""
    lines = read_rewards(run)
    rewards = [line for line in lines if "rollout/reward" in line]
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


def draw_runs(runs: list[str], output: str, start: float = math.nan) -> None:
    """Runs beside each other, by their minutes of training. A reward is the mean of up to nine
    iterations, from four before to four after. `start`: pass@1 on validation problems before
    training."""
    figure, panels = plt.subplots(1, 2, figsize=(8.8, 3.7), layout="constrained", sharey=True)
    for run in runs:
        minutes, rewards, points = [0.0], [], [start]
        for line in read_rewards(run):
            minutes.append(minutes[-1] + training_seconds(line) / 60)
            rewards.append(line.get("rollout/reward", math.nan))
            points.append(line.get("eval/pass@1", math.nan))
        windows = (rewards[max(0, i - 4) : i + 5] for i in range(len(rewards)))
        label = os.path.basename(os.path.normpath(run))
        panels[0].plot(minutes[1:], [statistics.mean(w) for w in windows], label=label)
        there = [i for i, point in enumerate(points) if not math.isnan(point)]
        panels[1].plot([minutes[i] for i in there], [points[i] for i in there], ".-")
    panels[0].set(xlabel="minutes of training", ylabel="share of right answers", ylim=(0, None))
    panels[0].set_title("sampled responses, smoothed")
    panels[1].set(xlabel="minutes of training", title="pass@1 on validation problems")
    for panel in panels:
        panel.grid(alpha=0.3)
    figure.legend(loc="outside upper center", ncols=len(runs))
    figure.savefig(output, dpi=150)
    plt.close(figure)


def main(
    runs: Annotated[list[str], tyro.conf.Positional],
    output: str = "curves.png",
    start: float = math.nan,
) -> None:
    """Draws one run by iterations, several by minutes of training.

    Args:
        runs: folders of runs
        output: the PNG file
        start: pass@1 on validation problems before training, if it is known (several runs)
    """
    if len(runs) == 1:
        draw_curves(runs[0], output)
    else:
        draw_runs(runs, output, start)
    print(output)


if __name__ == "__main__":
    tyro.cli(main)
