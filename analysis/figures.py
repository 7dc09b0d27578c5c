"""`make figures`: the paper's analysis, drawn from the runs of `make compare` (or compare-quick).

    python -m analysis.figures

Makes the runs that are missing, from the same SFT checkpoint and with the same seeds: VinePPO with
K = 1, 3, 9 (no sharing of rollouts), VinePPO and PPO at temperatures 0.8 and 1.0; and values.py on
checkpoints of the VinePPO, PPO and GRPO runs. A second call skips what is finished.
"""

import json
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
    NAMES,
    describe_machine,
    draw_band,
    drop_engine_states,
    plan,
    read_curve,
    run_all,
    save,
    spread,
    table,
)
from common import require

UNSHARED = ("--no-share-rollouts",)
KS = {1: "#7fb8de", 3: "#2f86c6", 9: "#08306b"}
TRUTH = values.Args.truth
TEMPERATURES = {0.6: "-", 0.8: "--", 1.0: ":"}
STATES_OF = {"vineppo": "vineppo", "ppo": "ppo", "grpo": "grpo", "rloo": "grpo"}  # whose runs
LABELS = {**NAMES, "rloo": "RLOO (on GRPO's runs)"}


@dataclass
class Args:
    folder: str = ""
    """folder with the runs of `make compare`; empty: runs/compare, or runs/quick without it"""
    output: str = ""
    """folder for the figures and figures.md; empty: docs, but runs/quick for those of runs/quick"""
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
            panel.set_title(
                f"{LABELS[estimator]}, iteration {iteration}\nMAE {mae:.3f}", fontsize=9
            )
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
            draw_band(panel, curves, "x", COLOURS[estimator], LABELS[estimator], "mae")
        panel.set(xlabel="position of the state in its response, %", xlim=(0, 100))
        panel.set_title(f"iteration {iteration}", fontsize=10)
        panel.grid(alpha=0.3)
    panels[0].set(ylabel="mean absolute error of the value", ylim=(0, None))
    panels[0].legend()
    save(figure, output)


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
                top, chance, point["decided"] = values.rank_actions(actions, estimator, TRUTH)
                if point["decided"]:
                    point |= {"top": top, "chance": chance}
                points.append(point)
            summary.setdefault(estimator, []).append(points)
    return summary


def draw_accuracy(summary: dict[str, list], output: str) -> None:
    """Figures 11, G.26: how close the values are to the truth, over training."""
    figure, panels = plt.subplots(2, 2, figsize=(9, 6.5), layout="constrained", sharex=True)
    labels = {
        "mae": "mean absolute error",
        "close": "share of values within 0.05",
        "explained": "explained variance",
        "top": "best of five next steps found",
    }
    for panel, (name, label) in zip(panels.flat, labels.items(), strict=True):
        for estimator, curves in summary.items():
            style = COLOURS[estimator], LABELS[estimator]
            draw_band(panel, curves, "iteration", *style, name)
            if name == "top":
                chance = [p["chance"] for curve in curves for p in curve if "chance" in p]
                if chance:
                    panel.axhline(statistics.mean(chance), color=COLOURS[estimator], lw=1, ls=":")
        panel.set_ylabel(label)
        panel.grid(alpha=0.3)
    panels[0, 0].set(ylim=(0, None))
    panels[0, 1].set(ylim=(0, 1.05))
    panels[1, 1].set(ylim=(0, 1.05))
    for panel in panels[1]:
        panel.set_xlabel("iteration")
        panel.xaxis.get_major_locator().set_params(integer=True)
    panels[0, 1].legend(fontsize=9)
    save(figure, output)


def draw_curves(curves: dict[str, list[list[dict]]], output: str) -> None:
    """Figures 5, 6, 7 and C.4: accuracy by iteration, KL, seconds and training reward."""
    figure, panels = plt.subplots(2, 2, figsize=(9, 7), layout="constrained", sharey=True)
    axes = {
        "iteration": "sampled episodes / 64",
        "kl": "KL(policy, SFT checkpoint), nats a demonstration",
        "seconds": "seconds of training",
        "reward": "mean reward of the next samples, training prompts",
    }
    for panel, (axis, label) in zip(panels.flat, axes.items(), strict=True):
        for method, seeds in curves.items():
            if axis in ("iteration", "seconds"):
                shown = [curve[axis == "seconds" :] for curve in seeds]  # no 0 on a log axis
                draw_band(panel, shown, axis, COLOURS[method], NAMES[method])
            else:  # where seeds do not line up: a point for each evaluation
                points = [p for curve in seeds for p in curve if axis in p]
                xs, ys = [p[axis] for p in points], [p["pass@1"] for p in points]
                panel.plot(xs, ys, ".", color=COLOURS[method], alpha=0.7)
        panel.set(xlabel=label, ylim=(0, 1))
        panel.grid(alpha=0.3)
    panels[0, 0].xaxis.get_major_locator().set_params(integer=True)
    panels[1, 0].set(xscale="log")
    for panel in panels[:, 0]:
        panel.set_ylabel("pass@1, validation, temperature 0.35")
    panels[0, 0].legend(fontsize=9)
    save(figure, output)


# ---- K and temperature ---------------------------------------------------------------------------


def draw_ablations(
    of_k: dict[int, list], of_temperature: dict[tuple[str, float], list], output: str
) -> None:
    """Figures 4 and F.23, K; Figure 8, temperature."""
    figure, panels = plt.subplots(2, 2, figsize=(9, 7), layout="constrained", sharey=True)
    for k, curves in of_k.items():
        draw_band(panels[0, 0], curves, "iteration", KS[k], f"VinePPO, K = {k}")
        trained = [curve[1:] for curve in curves]  # no 0 on a log axis
        draw_band(panels[0, 1], trained, "tokens", KS[k], f"VinePPO, K = {k}")
    panels[0, 0].set(xlabel="iteration")
    panels[0, 1].set(xlabel="tokens sampled, rollouts included", xscale="log")
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
        panel.legend(loc="upper left", fontsize=9)
    for panel in panels[:, 0]:
        panel.set_ylabel("pass@1, validation, temperature 0.35")
    save(figure, output)


def value_rows(summary: dict[str, list], iteration: int, labels: dict) -> list[list[str]]:
    rows = []
    for estimator, curves in summary.items():
        points = [p for curve in curves for p in curve if p["iteration"] == iteration]
        names = ("mae", "close", "explained", "top", "chance")
        found = [[p[name] for p in points if name in p] for name in names]
        cells = [spread(numbers) if numbers else "-" for numbers in found]
        rows.append([labels[estimator], *cells, str(sum(p["decided"] for p in points) or "-")])
    return rows


def write_tables(
    found, summary, shared, of_k, of_temperature, iterations, fit: dict, output: str
) -> None:
    """The figures' numbers, mean (lowest to highest) over seeds."""
    header = ["", "MAE", "within 0.05", "explained variance", "top action", "its chance", "states"]
    text = (
        f"Written by `python -m analysis.figures` (`make figures`), {time.strftime('%Y-%m-%d')}. "
    )
    text += (
        f"Machine: {describe_machine()}.\nMean (lowest to highest) over seeds; states: how many "
    )
    text += "had next steps to choose from, all seeds together.\n\n"
    for iteration in iterations:
        rows = value_rows(summary, iteration, LABELS)
        text += f"Iteration {iteration}, each on its own runs:\n\n{table(header, rows)}\n"
    rows = value_rows(shared, iterations[-1], NAMES)
    text += f"All four on the states of PPO's runs, iteration {iterations[-1]}:\n\n"
    text += f"{table(header, rows)}\n"
    for estimator in ("vineppo", "ppo"):
        everywhere = [
            a for of_run in found.get(estimator, []) for _, of in of_run.values() for a in of
        ]
        share, chance, decided = values.rank_actions(everywhere, estimator, TRUTH)
        text += (
            f"Top action, {NAMES[estimator]}, all of these iterations and seeds: {share:.0%} of "
        )
        text += f"{decided} states (chance {chance:.0%}).\n\n"
    last = fit["curve"][-1][1]
    text += (
        f"PPO's critic fitted to exact values of {fit['responses']} responses, {fit['epochs']} "
        f"times, of {fit['model']}: on other prompts explained variance {last['explained']:.2f}, "
        f"MAE {last['mae']:.3f}.\n\n"
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
        args.folder = "runs/compare" if has_all else "runs/quick"
    args.output = args.output or ("docs" if args.folder == "runs/compare" else args.folder)
    path = f"{args.folder}/results.json"
    require(
        os.path.exists(path), f"{path}: no such file; `make compare` (or compare-quick) makes it"
    )
    with open(path) as file:
        compared = json.load(file)
    paths, best, seeds = compared["paths"], compared["best"], compared["seeds"]
    methods = {*STATES_OF.values()}
    require(methods <= paths.keys(), f"{args.folder} lacks runs of one of {', '.join(methods)}")
    for method, name in (*((m, "hf") for m in methods), ("ppo", "critic_hf")):
        for path in paths[method]:
            for i in args.iterations:
                file = f"{path}/checkpoints/iteration_{i:06d}/{name}"
                require(
                    os.path.exists(file), f"{file} is missing: remove {path}, then compare again"
                )
    os.makedirs(args.output, exist_ok=True)

    of_k = {
        k: [("vineppo_cheap", best["vineppo"], s, *UNSHARED, "--k", str(k)) for s in seeds]
        for k in KS
    }
    of_temperature = {
        (method, t): [(method, best[method], seed, "--temperature", str(t)) for seed in seeds]
        for method in ("vineppo", "ppo")
        for t in (0.8, 1.0)
    }
    wanted = [key for keys in (*of_k.values(), *of_temperature.values()) for key in keys]
    runs, commands = plan(wanted, args.folder)
    middle = args.iterations[len(args.iterations) // 2]
    policy = f"{paths['vineppo'][0]}/checkpoints/iteration_{middle:06d}/hf"
    fitted = f"{args.folder}/critic_fit.json"
    fit = {"model": None}
    if os.path.exists(fitted):
        with open(fitted) as file:
            fit = json.load(file)
    if fit["model"] != policy:
        command = ["-m", "analysis.critic", "--model", policy, "--output", fitted]
        commands[f"{fitted}.log"] = command
    for method in dict.fromkeys(STATES_OF.values()):
        for path in paths[method]:
            # a group's mean is the same for all next steps, so its runs are not asked
            actions = "0" if method == "grpo" else "24"
            command = ["-m", "analysis.values", "--run", path, "--num-actions", actions]
            commands[f"{path}/values.log"] = [*command, "--iterations", *map(str, args.iterations)]
    bar = tqdm(unit="run", smoothing=0)
    run_all(commands, args.jobs, bar)
    bar.close()
    drop_engine_states(runs)

    def curves_of(keys: list[tuple]) -> list[list[dict]]:
        return [read_curve(runs[key], compared["start"]) for key in keys]

    of_k = {k: curves_of(keys) for k, keys in of_k.items()}
    of_temperature = {key: curves_of(keys) for key, keys in of_temperature.items()}
    for method in ("vineppo", "ppo"):
        of_temperature[method, 0.6] = compared["curves"][method]
    of_temperature = dict(sorted(of_temperature.items(), key=lambda item: item[0][1]))
    found = read_values(paths, args.iterations)
    summary = summarize(found, args.iterations)
    draw_curves(compared["curves"], f"{args.output}/curves.png")
    draw_scatter(found, args.iterations, f"{args.output}/values.png")
    draw_positions(found, args.iterations, f"{args.output}/positions.png")
    draw_accuracy(summary, f"{args.output}/accuracy.png")
    draw_ablations(of_k, of_temperature, f"{args.output}/ablations.png")
    with open(fitted) as file:
        fit = json.load(file)
    shared = summarize(dict.fromkeys(STATES_OF, found["ppo"]), args.iterations)
    write_tables(
        found,
        summary,
        shared,
        of_k,
        of_temperature,
        args.iterations,
        fit,
        f"{args.output}/figures.md",
    )
    print(f"{args.output}: curves, values, positions, accuracy, ablations (PNG, SVG), figures.md")


if __name__ == "__main__":
    main(tyro.cli(Args))
