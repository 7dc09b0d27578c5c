"""`make figures`: the paper's analysis, drawn from the runs of `make compare` (or compare-quick).

    python -m analysis.figures

Makes the runs that are missing, from the same SFT checkpoint and with the same seeds: VinePPO with
K = 1, 3, 9 (no sharing of rollouts), VinePPO and PPO at temperatures 0.8 and 1.0; and values.py on
checkpoints of the VinePPO, PPO and GRPO runs. What is finished is not done again.
"""

import json
import os
import statistics
from dataclasses import dataclass

import matplotlib
import torch
import tyro
from tqdm import tqdm

from analysis import values
from analysis.compare import COLOURS, NAMES, draw_band, read_curve, run_all, save, table, train
from common import require

matplotlib.use("Agg")
from matplotlib import pyplot as plt

KS = {1: "#a6cee3", 3: "#56a0d3", 9: "#0b4f8a"}
TEMPERATURES = {0.6: "-", 0.8: "--", 1.0: ":"}
VALUED = {"vineppo": ("vineppo",), "ppo": ("ppo",), "grpo": ("grpo", "rloo")}  # of whose runs
CRITIC = "critic_fit.json"


@dataclass
class Args:
    folder: str = ""
    """where `make compare` left its runs; default runs/compare, or else runs/quick"""
    output: str = ""
    """where the figures and figures.md go; default docs, or runs/quick for those of runs/quick"""
    iterations: tuple[int, ...] = (4, 8, 14, 20)
    """checkpoints whose values are analysed"""
    jobs: int = torch.cuda.device_count() or min(2, os.cpu_count() or 1)


# ---- values --------------------------------------------------------------------------------------


def read_values(paths: dict[str, list[str]], iterations: tuple[int, ...]) -> dict[str, list]:
    """{estimator: [for each seed {iteration: (states, actions)}]}, of the method's own runs."""
    found: dict[str, list] = {}
    for method, estimators in VALUED.items():
        for path in paths.get(method, []):
            of_run = {}
            for iteration in iterations:
                with open(f"{path}/values/iteration_{iteration:06d}.json") as file:
                    result = json.load(file)
                of_run[iteration] = result["states"], result["actions"]
            for estimator in estimators:
                found.setdefault(estimator, []).append(of_run)
    return found


def draw_scatter(found: dict[str, list], iterations: tuple[int, ...], output: str) -> None:
    """Figures 9, G.24: predicted against true values, all seeds."""
    figure, panels = plt.subplots(
        len(found),
        len(iterations),
        figsize=(2.6 * len(iterations), 2.5 * len(found)),
        layout="constrained",
        sharex=True,
        sharey=True,
        squeeze=False,
    )
    for row, (estimator, runs) in zip(panels, found.items(), strict=True):
        for panel, iteration in zip(row, iterations, strict=True):
            states = [state for of_run in runs for state in of_run[iteration][0]]
            truth, predicted = ([state[name] for state in states] for name in ("truth", estimator))
            panel.plot([0, 1], [0, 1], "-", color="#bbbbbb", lw=1)
            panel.plot(truth, predicted, "o", ms=3, mew=0, alpha=0.35, color=COLOURS[estimator])
            mae = values.measure(truth, predicted)["mae"]
            panel.set(ylim=(-0.1, 1.1))
            panel.set_title(f"{NAMES[estimator]}, iteration {iteration}\nMAE {mae:.3f}", fontsize=9)
        row[0].set_ylabel("predicted value")
    for panel in panels[-1]:
        panel.set_xlabel("true value")
    save(figure, output)


def draw_positions(found: dict[str, list], iterations: tuple[int, ...], output: str) -> None:
    """Figures 10, G.25: error by position in the response, first and last checkpoint."""
    shown = (iterations[0], iterations[-1])
    figure, panels = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained", sharey=True)
    for panel, iteration in zip(panels, shown, strict=True):
        for estimator, runs in found.items():
            curves = []
            for of_run in runs:
                tenths = values.error_by_position(of_run[iteration][0], estimator)
                points = [{"x": 10 * i + 5, "mae": mae} for i, mae in enumerate(tenths)]
                curves.append([p if p["mae"] == p["mae"] else {} for p in points])
            draw_band(panel, curves, "x", COLOURS[estimator], NAMES[estimator], "mae")
        panel.set(xlabel="position of the state in its response, %", xlim=(0, 100), ylim=(0, None))
        panel.set_title(f"iteration {iteration}", fontsize=10)
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("mean absolute error of the value")
    panels[0].legend()
    save(figure, output)


def summarize(found: dict[str, list], iterations: tuple[int, ...]) -> dict[str, list[list[dict]]]:
    """{estimator: [for each seed, for each iteration: its measures]}."""
    summary: dict[str, list] = {}
    for estimator, runs in found.items():
        for of_run in runs:
            points = []
            for iteration in iterations:
                states, actions = of_run[iteration]
                truth, predicted = ([s[name] for s in states] for name in ("truth", estimator))
                point = {"iteration": iteration, **values.measure(truth, predicted)}
                point["top"], point["chance"], decided = values.rank_actions(actions, estimator)
                if not decided:
                    del point["top"], point["chance"]
                points.append(point)
            summary.setdefault(estimator, []).append(points)
    return summary


def draw_accuracy(summary: dict[str, list], output: str) -> None:
    """Figures 11, G.26: how good the values are, over training."""
    figure, panels = plt.subplots(2, 2, figsize=(9, 6.5), layout="constrained", sharex=True)
    labels = {
        "mae": "mean absolute error",
        "close": "share of values within 0.05",
        "explained": "explained variance",
        "top": "best of five next steps found",
    }
    for panel, (name, label) in zip(panels.flat, labels.items(), strict=True):
        for estimator, curves in summary.items():
            # the group's mean ranks nothing: its top action is chance, on GRPO's and RLOO's runs
            style = COLOURS[estimator], NAMES[estimator]
            draw_band(panel, curves, "iteration", *style, name)
            if name == "top":
                chance = [p["chance"] for curve in curves for p in curve if "chance" in p]
                panel.axhline(statistics.mean(chance), color=COLOURS[estimator], lw=1, ls=":")
        panel.set_ylabel(label)
        panel.grid(alpha=0.3)
    panels[0, 1].set(ylim=(0, 1))
    panels[1, 0].set(ylim=(-1.5, 1.05))
    panels[1, 1].set(ylim=(0, 1.05))
    for panel in panels[1]:
        panel.set_xlabel("iteration")
        panel.xaxis.get_major_locator().set_params(integer=True)
    panels[0, 0].legend()
    save(figure, output)


# ---- K and temperature ---------------------------------------------------------------------------


def draw_ablations(
    of_k: dict[int, list], of_temperature: dict[tuple[str, float], list], output: str
) -> None:
    """Figures 4 and F.23, K; Figure 8, temperature."""
    figure, panels = plt.subplots(2, 2, figsize=(9, 7), layout="constrained", sharey=True)
    for k, curves in of_k.items():
        draw_band(panels[0, 0], curves, "iteration", KS[k], f"VinePPO, K = {k}")
        draw_band(panels[0, 1], curves, "tokens", KS[k], f"VinePPO, K = {k}")
    panels[0, 0].set(xlabel="iteration")
    panels[0, 1].set(xlabel="tokens sampled, rollouts included", xscale="symlog")
    panels[0, 1].set_xscale("symlog", linthresh=1e4)
    for panel, method in zip(panels[1], ("vineppo", "ppo"), strict=True):
        for (name, temperature), curves in of_temperature.items():
            if name == method:
                label = f"{NAMES[method]}, temperature {temperature:g}"
                draw_band(panel, curves, "iteration", COLOURS[method], label)
                panel.lines[-1].set(linestyle=TEMPERATURES[temperature], marker="")
        panel.set(xlabel="iteration")
    for panel in panels.flat:
        panel.set(ylim=(0, 1))
        panel.grid(alpha=0.3)
        panel.legend(loc="lower right", fontsize=9)
    for panel in panels[:, 0]:
        panel.set_ylabel("pass@1, validation, temperature 0.35")
    save(figure, output)


def spread(numbers: list[float], form: str = ".2f") -> str:
    if not numbers:
        return "-"
    return f"{statistics.mean(numbers):{form}} ({min(numbers):{form}} to {max(numbers):{form}})"


def write_tables(summary, of_k, of_temperature, iterations, fit: dict, output: str) -> None:
    """The figures' numbers, mean (lowest to highest) over seeds."""
    header = ["", "MAE", "within 0.05", "explained variance", "top action", "its chance"]
    text = ""
    for iteration in (iterations[0], iterations[-1]):
        rows = []
        for estimator, curves in summary.items():
            points = [p for curve in curves for p in curve if p["iteration"] == iteration]
            names = ("mae", "close", "explained", "top", "chance")
            cells = [spread([p[name] for p in points if name in p]) for name in names]
            rows.append([NAMES[estimator], *cells])
        text += f"Values at iteration {iteration}:\n\n{table(header, rows)}\n"
    text += (
        f"PPO's critic fitted to exact values of {fit['responses']} responses: explained variance "
        f"{fit['explained']:.2f}, MAE {fit['mae']:.3f} on other prompts.\n\n"
    )
    rows = [
        [
            f"VinePPO, K = {k}",
            spread([c[-1]["pass@1"] for c in curves]),
            f"{statistics.mean(c[-1]['tokens'] for c in curves) / 1e3:.0f}",
        ]
        for k, curves in of_k.items()
    ]
    text += table(["no sharing of rollouts", "last pass@1, validation", "thousand tokens"], rows)
    rows = [
        [f"{NAMES[method]}, temperature {t:g}", spread([c[-1]["pass@1"] for c in curves])]
        for (method, t), curves in of_temperature.items()
    ]
    text += "\n" + table(["", "last pass@1, validation"], rows)
    with open(output, "w") as file:
        file.write(text)


def main(args: Args) -> None:
    if not args.folder:
        has_all = os.path.exists("runs/compare/results.json")
        args.folder, output = ("runs/compare", "docs") if has_all else ("runs/quick", "runs/quick")
        args.output = args.output or output
    args.output = args.output or "docs"
    path = f"{args.folder}/results.json"
    require(
        os.path.exists(path), f"{path}: no such file; `make compare` (or compare-quick) makes it"
    )
    with open(path) as file:
        compared = json.load(file)
    paths, best, seeds = compared["paths"], compared["best"], compared["seeds"]
    require({*VALUED} <= paths.keys(), f"{args.folder} has no runs of {', '.join(VALUED)}")
    os.makedirs(args.output, exist_ok=True)
    bar = tqdm(unit="run", smoothing=0)

    def curves_of(method: str, *extra: str) -> list[list[dict]]:
        wanted = [(method, best[method], seed) for seed in seeds]
        runs = train(wanted, args.folder, args.jobs, bar, extra)
        return [read_curve(runs[key], compared["start"]) for key in wanted]

    of_k = {k: curves_of("vineppo", "--no-share-rollouts", "--k", str(k)) for k in KS}
    of_temperature = {}
    for method in ("vineppo", "ppo"):
        own = [read_curve(path, compared["start"]) for path in paths[method]]
        of_temperature[method, 0.6] = own
        for t in (0.8, 1.0):
            of_temperature[method, t] = curves_of(method, "--temperature", str(t))
    commands = {}
    for method in VALUED:
        for path in paths[method]:
            command = ["-m", "analysis.values", "--run", path, "--iterations"]
            commands[f"{path}/values.log"] = [*command, *map(str, args.iterations)]
    fitted = f"{args.folder}/{CRITIC}"
    if not os.path.exists(fitted):
        commands[f"{fitted}.log"] = ["-m", "analysis.critic", "--output", fitted]
    run_all(commands, args.jobs, bar)
    bar.close()

    found = read_values(paths, args.iterations)
    summary = summarize(found, args.iterations)
    draw_scatter(found, args.iterations, f"{args.output}/values.png")
    draw_positions(found, args.iterations, f"{args.output}/positions.png")
    draw_accuracy(summary, f"{args.output}/accuracy.png")
    draw_ablations(of_k, of_temperature, f"{args.output}/ablations.png")
    with open(fitted) as file:
        responses, last = json.load(file)[-1]
    fit = {"responses": responses, **last}
    write_tables(summary, of_k, of_temperature, args.iterations, fit, f"{args.output}/figures.md")
    print(f"{args.output}: values, positions, accuracy, ablations (PNG, SVG), figures.md")


if __name__ == "__main__":
    main(tyro.cli(Args))
