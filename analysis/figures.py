"""How good are the values? The paper's analysis, of runs of `make compare` (or compare-quick).

    python -m analysis.figures

Where they are missing, it makes the figures of analysis/values.py for checkpoints of the VinePPO,
PPO and GRPO runs, and those of analysis/critic.py: can PPO's critic be fitted to exact values?
"""

import json
import math
import os
import statistics
import time
from dataclasses import dataclass

import torch
import tyro
from matplotlib import pyplot as plt
from tqdm import tqdm

from analysis import values
from analysis.compare import (
    COLOURS,
    MARKERS,
    NAMES,
    STYLES,
    describe_machine,
    draw_band,
    interval,
    legend_above,
    run_all,
    save,
    table,
    write_block,
)
from common import require

TRUTH = values.Args.truth
STATES_OF = {"vineppo": "vineppo", "ppo": "ppo", "grpo": "grpo", "rloo": "grpo"}  # whose runs
LABELS = {**NAMES, "rloo": "RLOO (on GRPO's runs)"}


@dataclass
class Args:
    folder: str = ""
    """folder with the runs of `make compare`; empty: runs/compare, or runs/quick without it"""
    output: str = ""
    """where figures and results.md go; default docs, or runs/quick for those of runs/quick"""
    iterations: tuple[int, ...] = (4, 12, 20)
    """checkpoints whose values are analysed"""
    jobs: int = torch.cuda.device_count() or min(2, os.cpu_count() or 1)


# ---- values --------------------------------------------------------------------------------------


def read_values(paths: dict[str, list[str]], iterations: tuple[int, ...]) -> dict[str, list]:
    """{estimator: [for each seed {iteration: (states, actions)}]}."""
    found: dict[str, list] = {}
    for estimator, method in STATES_OF.items():
        for path in paths[method]:
            of_run = {}
            for iteration in iterations:
                with open(f"{path}/values/iteration_{iteration:06d}.json") as file:
                    result = json.load(file)
                of_run[iteration] = result["states"], result["actions"]
            found.setdefault(estimator, []).append(of_run)
    return found


def draw_values(found: dict[str, list], iteration: int, output: str) -> None:
    """Figures 9, G.24: predicted against true values, all seeds, and the mean prediction for each
    fifth of the true values. RLOO looks like GRPO and is left out."""
    shown = {name: runs for name, runs in found.items() if name != "rloo"}
    figure, panels = plt.subplots(
        1, len(shown), figsize=(8.8, 3.3), layout="constrained", sharey=True, squeeze=False
    )
    for panel, (estimator, runs) in zip(panels[0], shown.items(), strict=True):
        states = [state for of_run in runs for state in of_run[iteration][0]]
        panel.plot([0, 1], [0, 1], "-", color="#bbbbbb", lw=1)
        truth, predicted = ([state[name] for state in states] for name in ("truth", estimator))
        panel.plot(truth, predicted, "o", ms=3, mew=0, alpha=0.3, color=COLOURS[estimator])
        fifths: list[list[tuple]] = [[] for _ in range(5)]
        for pair in zip(truth, predicted, strict=True):
            fifths[min(4, int(5 * pair[0]))].append(pair)
        means = [tuple(map(statistics.mean, zip(*pairs, strict=True))) for pairs in fifths if pairs]
        panel.plot(*zip(*means, strict=True), "-", color="black", marker=MARKERS[estimator])
        panel.set(title=NAMES[estimator], xlabel=f"true value ({TRUTH} rollouts)")
    panels[0, 0].set_ylabel("predicted value")
    save(figure, output)


def error_curves(runs: list[dict], estimator: str, iteration: int) -> list[list[dict]]:
    """For each seed its mean absolute error by position, where all seeds have states."""
    tenths = [values.error_by_position(of_run[iteration][0], estimator) for of_run in runs]
    kept = [
        i for i, errors in enumerate(zip(*tenths, strict=True)) if not any(map(math.isnan, errors))
    ]
    return [[{"position": 10 * i + 5, "mae": errors[i]} for i in kept] for errors in tenths]


def summarize(found: dict[str, list], iterations: tuple[int, ...]) -> dict[str, list[list[dict]]]:
    """{estimator: [for each seed, for each iteration: its measures]}, on the estimator's states in
    `found`."""
    summary: dict[str, list] = {}
    for estimator, runs in found.items():
        for of_run in runs:
            points = []
            for iteration in iterations:
                states, actions = of_run[iteration]
                truth, predicted = ([s[name] for s in states] for name in ("truth", estimator))
                point = {"iteration": iteration, **values.measure(truth, predicted)}
                point["within"] = values.within_problems(states, estimator)
                _, point["ceiling"] = values.ceilings(states, TRUTH)
                top, chance, point["decided"] = values.rank_actions(actions, estimator, TRUTH)
                if point["decided"]:
                    point |= {"top": top, "chance": chance}
                points.append(point)
            summary.setdefault(estimator, []).append(points)
    return summary


def draw_accuracy(summary: dict[str, list], found: dict[str, list], output: str) -> None:
    """Figures 11, G.26: how good the values are over training; 10, G.25: along a response of the
    last checkpoint."""
    figure, panels = plt.subplots(2, 2, figsize=(8.8, 6.6), layout="constrained")
    labels = {
        "mae": "mean absolute error of the value",
        "close": "share of values within 0.05",
        "top": "best of five next steps found",
    }
    for panel, (name, label) in zip(panels.flat, labels.items(), strict=False):
        for estimator, curves in summary.items():
            if any(name in point for curve in curves for point in curve):
                style = LABELS[estimator], *STYLES[estimator][1:]
                draw_band(panel, curves, "iteration", style, name)
            if name == "top":
                chance = [p["chance"] for curve in curves for p in curve if "chance" in p]
                if chance:
                    panel.axhline(statistics.mean(chance), color=COLOURS[estimator], lw=1, ls=":")
        panel.set(title=label, xlabel="iteration", ylim=(0, None if name == "mae" else 1.02))
        panel.xaxis.get_major_locator().set_params(integer=True)
    last = max(point["iteration"] for curves in summary.values() for point in curves[0])
    for estimator, runs in found.items():
        draw_band(
            panels[1, 1], error_curves(runs, estimator, last), "position", STYLES[estimator], "mae"
        )
    panels[1, 1].set(title=f"mean absolute error, iteration {last}", xlim=(0, 100), ylim=(0, None))
    panels[1, 1].set_xlabel("position of the state in its response, %")
    legend_above(figure, panels[0, 0])
    save(figure, output)


# ---- writing -------------------------------------------------------------------------------------


def describe_actions(found: dict[str, list], estimator: str) -> str:
    everywhere = [a for of_run in found[estimator] for _, of in of_run.values() for a in of]
    share, chance, decided = values.rank_actions(everywhere, estimator, TRUTH)
    return f"{NAMES[estimator]} {share:.0%} of {decided} states (chance {chance:.0%})"


def write_numbers(found, summary, iterations, seeds, fit: dict, output: str) -> None:
    """The block `figures` of results.md."""
    middle, last = iterations[len(iterations) // 2], iterations[-1]

    def at_last(curves: list[list[dict]], name: str) -> str:
        points = [point for curve in curves for point in curve]
        return interval([p[name] for p in points if p["iteration"] == last], ".2f")

    header = ["", "mean absolute error", "within 0.05", "explained variance"]
    header += ["within problems", "that of exact values"]
    names = "mae", "close", "explained", "within", "ceiling"
    of_values = table(
        header,
        [[LABELS[e], *(at_last(of, name) for name in names)] for e, of in summary.items()],
    )
    elsewhere = summarize({"vineppo": found["ppo"]}, iterations)["vineppo"]
    learnt = fit["curve"][-1][1]
    text = f"""<!-- figures -->
Written by `python -m analysis.figures`, {time.strftime("%Y-%m-%d")}, on {describe_machine()}.
Means over seeds {", ".join(map(str, seeds))}, ± as above. Values at iteration {last}:

{of_values}
VinePPO's error on PPO's states: {at_last(elsewhere, "mae")}.
Best next step, all iterations:
{describe_actions(found, "vineppo")}, {describe_actions(found, "ppo")}. PPO's
critic, fitted {fit["epochs"]} times to exact values of {fit["responses"]:,} responses of VinePPO's
iteration {middle}, explains {learnt["explained"]:.0%} of their variance on other prompts,
{learnt["within"]:.0%} of what is left within a response.

*Explained variance*: 1 - Var(truth - estimate) / Var(truth); negative: worse than a constant.
*Within problems*: the same around each problem's means. Last column: what
exact values have there; the truth is noisy.

![Predicted against true values](values.png)

*By `analysis.figures`, iteration {middle}; black: mean of a fifth of the true values.*

![Errors of values; best next step](accuracy.png)

*By `analysis.figures`; dotted: chance.*
<!-- end of figures -->
"""
    write_block(output, "figures", text)


def read_compared(args) -> dict:
    """results.json of the comparison in `args.folder`; fills in the arguments that are empty.
    Raises UsageError if there is none, or one of an older version."""
    if not args.folder:
        has_all = os.path.exists("runs/compare/results.json")
        args.folder = "runs/compare" if has_all else "runs/quick"
    args.output = args.output or ("docs" if args.folder == "runs/compare" else args.folder)
    path = f"{args.folder}/results.json"
    require(
        os.path.exists(path), f"{path}: no such file; `make compare` (or compare-quick) makes it"
    )
    with open(path) as file:
        compared = json.load(file)
    older = f"{path} is of an older version: remove {args.folder}, then compare again"
    require("starts" in compared, older)
    os.makedirs(args.output, exist_ok=True)
    return compared


def main(args: Args) -> None:
    compared = read_compared(args)
    paths, seeds = compared["paths"], compared["seeds"]
    methods = {*STATES_OF.values()}
    require(methods <= paths.keys(), f"{args.folder} lacks runs of one of {', '.join(methods)}")
    for method, name in (*((m, "hf") for m in methods), ("ppo", "critic_hf")):
        for path in paths[method]:
            for i in args.iterations:
                file = f"{path}/checkpoints/iteration_{i:06d}/{name}"
                require(
                    os.path.exists(file), f"{file} is missing: remove {path}, then compare again"
                )
    commands = {}
    middle = args.iterations[len(args.iterations) // 2]
    policy = f"{paths['vineppo'][0]}/checkpoints/iteration_{middle:06d}/hf"
    fitted = f"{args.folder}/critic_fit.json"
    fit = {"model": None}
    if os.path.exists(fitted):
        with open(fitted) as file:
            fit = json.load(file)
    if fit["model"] != policy or "within" not in fit["curve"][-1][1]:  # of an older version
        command = ["-m", "analysis.critic", "--model", policy, "--output", fitted]
        commands[f"{fitted}.log"] = command
    for method in dict.fromkeys(STATES_OF.values()):
        for path in paths[method]:
            # a group's mean is the same for all next steps, so its runs are not asked
            actions = "0" if method == "grpo" else "24"
            command = ["-m", "analysis.values", "--run", path, "--num-actions", actions]
            commands[f"{path}/values.log"] = [*command, "--iterations", *map(str, args.iterations)]
    bar = tqdm(unit="command", smoothing=0)
    run_all(commands, args.jobs, bar)
    bar.close()
    found = read_values(paths, args.iterations)
    summary = summarize(found, args.iterations)
    draw_values(found, middle, f"{args.output}/values.png")
    draw_accuracy(summary, found, f"{args.output}/accuracy.png")
    with open(fitted) as file:
        fit = json.load(file)
    page = f"{args.output}/results.md"
    write_numbers(found, summary, args.iterations, seeds, fit, page)
    print(f"{page}, values.png, accuracy.png")


if __name__ == "__main__":
    main(tyro.cli(Args))
