"""`make compare`: every method from the same SFT checkpoints, on the same number of episodes.

    python -m analysis.compare                          grid and three seeds: docs/results.md
    python -m analysis.compare --seeds 1 2 3 4 5 --no-grid    five seeds at the default rates
    python -m analysis.compare --seeds 1 --no-grid --output runs/quick   one seed, kept apart

Each seed has an SFT checkpoint of its own, from which all methods start: so an interval over seeds
contains what differs between checkpoints. Each method runs with its defaults, at each learning rate
of one grid and with each seed. Where a method's best rate (mean over seeds of the last pass@1 on
validation problems) is at an edge of the grid, the grid is extended there. The runs at the best
rates are evaluated on the test problems.

A run takes one core (or one GPU). A second call skips what is finished.
"""

import glob
import hashlib
import importlib
import itertools
import json
import os
import platform
import queue
import shutil
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import matplotlib
import torch
import tyro
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

import sft
from analysis.curves import read_metrics, training_seconds
from common import UsageError, data, require
from recipes.demo import make_launcher, make_sft, sft_folder

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.ticker import LogLocator

# figures are 8.8 inches wide: 880 points on a page, so text of 9.5 stays readable
plt.rcParams |= {"font.size": 9.5, "axes.titlesize": 10, "savefig.dpi": 180}
plt.rcParams |= {"axes.grid": True, "grid.alpha": 0.3, "axes.axisbelow": True}
plt.rcParams |= {"axes.spines.top": False, "axes.spines.right": False}
plt.rcParams |= {"lines.markersize": 4, "legend.frameon": False}

GRID = [3e-5, 6e-5, 1.2e-4, 2.4e-4]
EVALUATION = ["--eval-problems", "250", "--eval-rounds", "4", "--keep-checkpoints", "1000"]
# Each script's own steps between evaluations; a checkpoint with each, for the KL.
ONLINE = ["--eval-every", "2", "--save-every", "2"]
METHODS = dict.fromkeys(("vineppo", "grpo", "rloo", "ppo"), ONLINE)
METHODS |= {"restem": [], "dpo_pos": ["--eval-every", "12", "--save-every", "12"]}
STYLES = {  # colours that colour-blind readers tell apart (Okabe and Ito), and markers besides
    "vineppo": ("VinePPO", "#d55e00", "o"),
    "grpo": ("GRPO", "#0072b2", "s"),
    "rloo": ("RLOO", "#009e73", "^"),
    "ppo": ("PPO", "#cc79a7", "D"),
    "restem": ("RestEM", "#e69f00", "v"),
    "dpo_pos": ("DPO-Positive", "#777777", "X"),
}
NAMES = {method: name for method, (name, _, _) in STYLES.items()}
COLOURS = {method: colour for method, (_, colour, _) in STYLES.items()}
MARKERS = {method: marker for method, (_, _, marker) in STYLES.items()}
EPISODES = 64  # of an iteration of the policy-gradient scripts
TITLE = "# The methods, compared\n\n"
# 97.5 % quantiles of Student's t for 2 to 10 seeds; with more, the last: a little too wide
T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
Runs = dict[tuple, str]  # (method, learning rate, seed, further flags ...) -> folder


# ---- running -------------------------------------------------------------------------------------


def threads_of_a_run(jobs: int) -> int:
    return max(1, (os.cpu_count() or 1) // jobs)


def run_all(commands: dict[str, list[str]], jobs: int, bar: tqdm) -> None:
    """Runs commands, `jobs` at a time; {file for its output: command}. When one fails, waits for
    those that run beside it, then raises UsageError."""
    devices = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    if devices == [""]:
        devices = [str(i) for i in range(torch.cuda.device_count())]
    slots: queue.Queue[int] = queue.Queue()
    for slot in range(jobs):
        slots.put(slot)

    def call(item: tuple[str, list[str]]) -> None:
        log, command = item
        slot = slots.get()
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads_of_a_run(jobs))}
        if devices:
            environment["CUDA_VISIBLE_DEVICES"] = devices[slot % len(devices)]
        bar.set_postfix_str(os.path.basename(log).removesuffix(".log"))
        with open(log, "a") as file:
            failed = subprocess.call(
                [sys.executable, *command], env=environment, stdout=file, stderr=file
            )
        slots.put(slot)
        if failed:
            raise UsageError(f"`python {' '.join(command)}` failed: {log} says why")
        bar.update()

    bar.total = bar.n + len(commands)
    with ThreadPoolExecutor(jobs) as pool:
        futures = [pool.submit(call, item) for item in commands.items()]
        try:
            for future in futures:
                future.result()
        except BaseException:  # Ctrl-C too
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def plan(wanted: list[tuple], folder: str) -> tuple[Runs, dict[str, list[str]]]:
    """({key: folder of its run}, the commands of unfinished runs, as `run_all` takes them). Raises
    UsageError where a folder's run is of another command or SFT checkpoint."""
    runs, commands, weights = {}, {}, {}
    for key in wanted:
        method, rate, seed, *flags = key
        model = f"{sft_folder(seed)}/hf"
        if seed not in weights:
            with open(f"{model}/model.safetensors", "rb") as file:
                weights[seed] = hashlib.sha256(file.read()).hexdigest()
        suffix = "".join(flags).replace("--", "-")
        name = method.removesuffix("_cheap")  # a fork's runs differ in their flags
        path = runs[key] = f"{folder}/{name}-lr{rate:g}-seed{seed}{suffix}"
        is_fork = method not in METHODS
        command = ["-m", f"experiments.{method}"] if is_fork else [f"{method}.py"]
        command += ["--model", model, "--output-dir", path]
        command += ["--seed", str(seed), "--learning-rate", f"{rate:g}"]
        command += [*METHODS.get(method, ONLINE), *EVALUATION, *flags]
        origin = f"{' '.join(command)} of {weights[seed]}\n"
        if os.path.exists(f"{path}.origin"):
            with open(f"{path}.origin") as file:
                same = file.read() == origin
            require(same, f"{path} is of another command or SFT checkpoint: remove {folder}")
        with open(f"{path}.origin", "w") as file:
            file.write(origin)
        if not os.path.exists(f"{path}/finished"):
            resume = "auto" if os.path.exists(f"{path}/args.json") else "no"
            commands[f"{path}.log"] = [*command, "--resume", resume]
    return runs, commands


def drop_engine_states(runs: Runs) -> None:
    """Deletes what only a resume needs; the weights stay."""
    for path in runs.values():
        for engine in ("policy", "critic"):
            for state in glob.glob(f"{path}/checkpoints/*/{engine}"):
                shutil.rmtree(state)


def train(wanted: list[tuple], folder: str, jobs: int, bar: tqdm) -> Runs:
    """Runs those that are not finished yet."""
    runs, commands = plan(wanted, folder)
    run_all(commands, jobs, bar)
    drop_engine_states(runs)
    return runs


def evaluate(paths: list[str], name: str, options: list[str], jobs: int, bar: tqdm) -> list[float]:
    """pass@1 of the newest checkpoints of these runs; the results stay there as <name>.json."""
    commands = {}
    for path in paths:
        if not os.path.exists(output := f"{path}/{name}.json"):
            command = ["evaluate.py", "--model", f"{path}/hf", "--output", output, *options]
            commands[f"{path}/{name}.log"] = command
    run_all(commands, jobs, bar)
    scores = []
    for path in paths:
        with open(f"{path}/{name}.json") as file:
            scores.append(json.load(file)["pass@1"])
    return scores


def evaluate_starts(seeds: tuple[int, ...], jobs: int, bar: tqdm) -> list[float]:
    """pass@1 of the seeds' SFT checkpoints on validation problems."""
    options = ["--split", "validation", "--num-problems", "250", "--rounds", "4"]
    return evaluate([sft_folder(seed) for seed in seeds], "validation", options, jobs, bar)


# ---- reading -------------------------------------------------------------------------------------


def read_curve(path: str, start: float) -> list[dict[str, float]]:
    """A run's evaluations on validation problems, that of the SFT checkpoint (`start`) first. Each
    has the iterations (by sampled episodes), gradient steps, seconds of training and tokens sampled
    until then (without evaluation, except that of RestEM's walk), and the mean reward of the next
    sampled responses, the first ones of the evaluated policy."""
    method = os.path.basename(path).split("-")[0]
    with open(f"{path}/args.json") as file:
        args = json.load(file)
    episodes = args["num_prompts"] * args["group_size"]
    points = [{"iteration": 0.0, "steps": 0, "seconds": 0.0, "tokens": 0, "pass@1": start}]
    total = dict(points[0])
    for line in read_metrics(path):
        if "rollout/reward" in line:
            total["iteration"] += episodes / EPISODES
            points[-1].setdefault("reward", line["rollout/reward"])
        total["steps"] += {"restem": line.get("walk/updates", 0), "dpo_pos": 1}.get(
            method, args["update_epochs"] * episodes // args["minibatch_size"]
        )
        total["seconds"] += training_seconds(line)
        total["tokens"] += line.get("tokens/sample", 0) + line.get("tokens/rollouts", 0)
        if method == "restem":
            walked = line["walk/evaluations"] * args["eval_problems"] * args["eval_rounds"]
            total["tokens"] += walked * line["rollout/response_length"]
        if "eval/pass@1" in line:
            points.append({**total, "pass@1": line["eval/pass@1"], "done": line["iteration"]})
    return points


def reach(curve: list[dict[str, float]], target: float, axis: str) -> float:
    """Where a curve, straight between evaluations, first reaches `target`; inf: never."""
    if curve[0]["pass@1"] >= target:
        return curve[0][axis]
    for before, after in itertools.pairwise(curve):
        if after["pass@1"] >= target:
            share = (target - before["pass@1"]) / (after["pass@1"] - before["pass@1"])
            return before[axis] + share * (after[axis] - before[axis])
    return float("inf")


@torch.no_grad()
def measure_kl(
    curves: dict[str, list[dict[str, float]]], start: str, temperature: float = 0.6
) -> None:
    """Adds KL(policy, SFT checkpoint) to the points of {run: curve}; `start`: that checkpoint.
    Exact at each token of the demonstrations for 100 validation problems, summed over tokens, mean
    over problems."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, logging

    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(start)
    problems = data.load_problems("chain", "validation")[:100]
    encoded = sft.encode_solutions(problems, tokenizer, 128)
    input_ids = pad_sequence([torch.tensor(p + r) for p, r in encoded], batch_first=True)
    position = torch.arange(input_ids.shape[1])
    first = torch.tensor([len(p) - 1 for p, _ in encoded])[:, None]  # predicts the first token
    last = torch.tensor([len(p) + len(r) - 2 for p, r in encoded])[:, None]
    mask = (first <= position) & (position <= last)  # (b, L)

    def logprobs_of(model: str) -> torch.Tensor:
        policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        return torch.log_softmax(policy(input_ids).logits[mask] / temperature, dim=-1)  # (N, V)

    reference = logprobs_of(start)
    for path, curve in curves.items():
        curve[0]["kl"] = 0.0
        for point in curve[1:]:
            policy = logprobs_of(f"{path}/checkpoints/iteration_{point['done']:06d}/hf")
            point["kl"] = (policy.exp() * (policy - reference)).sum().item() / len(encoded)


# ---- drawing -------------------------------------------------------------------------------------


def draw_band(
    panel,
    curves: list[list[dict]],
    axis: str,
    style: tuple[str, str, str],
    name: str = "pass@1",
    line: str = "-",
) -> None:
    """The seeds' mean of `name` over their mean of `axis`, evaluation by evaluation, and a band
    from the lowest seed to the highest. `style`: label, colour and marker. A seed with fewer
    evaluations than another counts with those that it has at the same share of its way."""
    length = max(map(len, curves))
    xs, means, lows, highs = [], [], [], []
    for i in range(length):
        places = [round(i * (len(curve) - 1) / max(1, length - 1)) for curve in curves]
        points = [curve[place] for curve, place in zip(curves, places, strict=True)]
        points = [p for p in points if axis in p and name in p]
        if points:
            ys = [p[name] for p in points]
            xs.append(statistics.mean(p[axis] for p in points))
            means.append(statistics.mean(ys))
            lows.append(min(ys))
            highs.append(max(ys))
    label, colour, marker = style
    panel.plot(xs, means, linestyle=line, marker=marker, color=colour, label=label)
    panel.fill_between(xs, lows, highs, color=colour, alpha=0.14, lw=0)


def use_log_axis(axis) -> None:
    """Logarithmic, with ticks that are written out: 3, 10, 30."""
    axis.axes.set_xscale("log")
    axis.set_major_locator(LogLocator(subs=(1, 3)))
    axis.set_major_formatter(lambda x, _: f"{x:g}")
    axis.set_minor_formatter("")


def legend_above(figure, panel) -> None:
    """One row for all panels, outside of them."""
    handles, labels = panel.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=len(labels))


def draw_results(curves: dict[str, list[list[dict]]], output: str) -> None:
    """Accuracy by what it costs: gradient steps, seconds."""
    figure, panels = plt.subplots(1, 2, figsize=(8.8, 3.9), layout="constrained", sharey=True)
    for method, seeds in curves.items():
        draw_band(panels[0], seeds, "steps", STYLES[method])
        trained = [curve[1:] for curve in seeds]  # no 0 on a log axis
        draw_band(panels[1], trained, "seconds", STYLES[method])
    panels[0].set(xlabel="gradient steps", xlim=(0, None), ylim=(0, 1))
    panels[0].set_ylabel("pass@1 on validation problems")
    panels[1].set_xlabel("seconds of training (log scale)")
    use_log_axis(panels[1].xaxis)
    legend_above(figure, panels[0])
    save(figure, output)


def draw_curves(curves: dict[str, list[list[dict]]], scores: dict, output: str) -> None:
    """Accuracy by KL; training reward; accuracy by learning rate, where there is a grid."""
    has_grid = any(len(of_rate) > 1 for of_rate in scores.values())
    count = 2 + has_grid
    figure, panels = plt.subplots(1, count, figsize=(8.8, 3.7), layout="constrained", sharey=True)
    for method, seeds in curves.items():
        draw_band(panels[0], seeds, "kl", STYLES[method])
        if sum("reward" in point for point in seeds[0]) > 1:  # DPO-Positive samples once
            draw_band(panels[1], seeds, "steps", STYLES[method], "reward")
        if has_grid:
            of_rate = sorted(scores[method].items())
            last = zip(*([{"rate": r, "pass@1": y} for y in ys] for r, ys in of_rate), strict=True)
            draw_band(panels[2], list(last), "rate", STYLES[method])
    panels[0].set(xlabel="KL(policy, SFT checkpoint), nats", xlim=(0, None), ylim=(0, 1))
    panels[0].set_title("pass@1 on validation problems")
    panels[1].set(xlabel="gradient steps", xlim=(0, None))
    panels[1].set_title("mean reward of training samples")
    if has_grid:
        panels[2].set(xlabel="learning rate (log scale)", xscale="log")
        panels[2].set_title("last pass@1, validation problems")
    legend_above(figure, panels[0])
    save(figure, output)


def save(figure, output: str) -> None:
    figure.savefig(output)
    plt.close(figure)


# ---- writing -------------------------------------------------------------------------------------


def spread(values: list[float], form: str = ".3f", bounds: bool = True) -> str:
    """Mean (lowest to highest) of the seeds that get there, and how many of them never do."""
    reached = [value for value in values if value != float("inf")]
    if not reached:
        return "never"
    text = f"{statistics.mean(reached):{form}}"
    if bounds and len(values) > 1:
        text += f" ({min(reached):{form}} to {max(reached):{form}})"
    missing = len(values) - len(reached)
    return text + (f", {missing} of {len(values)} never" if missing else "")


def interval(values: list[float], form: str = ".3f") -> str:
    """Mean ± half of its 95 % interval over seeds, by Student's t; of one seed there is none."""
    text = f"{statistics.mean(values):{form}}"
    if len(values) > 1:
        error = statistics.stdev(values) / len(values) ** 0.5
        text += f" ± {T[min(len(values) - 2, len(T) - 1)] * error:{form}}"
    return text


def shares(ours: list[float], theirs: list[float]) -> str:
    """ours / theirs, seed by seed."""
    never = float("inf")
    return ", ".join(
        "never" if b == never else "VinePPO never" if a == never else f"{a / b:.2f}"
        for a, b in zip(ours, theirs, strict=True)
    )


def table(header: list[str], rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(line) + " |" for line in (header, *rows)]
    return "\n".join([lines[0], "|---" * len(header) + "|", *lines[1:]]) + "\n"


def describe_machine() -> str:
    if torch.cuda.is_available():
        return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
    with open("/proc/cpuinfo") as file:
        names = [line.split(":")[1].strip() for line in file if line.startswith("model name")]
    return f"{os.cpu_count()} cores ({names[0] if names else platform.machine()}), no GPU"


def write_results(
    output: str,
    curves: dict[str, list[list[dict[str, float]]]],
    best: dict[str, float],
    test: dict[str, list[float]],
    sft: list[float],
    seeds: tuple[int, ...],
    jobs: int,
    grid: bool,
) -> None:
    """The block `compare` of results.md; what stands around it stays."""
    rows, ours = [], test.get("vineppo", [])
    for method in sorted(curves, key=lambda m: -statistics.mean(test[m])):
        runs = curves[method]
        ends = [curve[-1] for curve in runs]
        lead = [a - b for a, b in zip(ours, test[method], strict=True)] if ours else []
        rows.append(
            [
                NAMES[method],
                f"{best[method]:.2g}",
                interval(test[method]),
                *(["" if method == "vineppo" else interval(lead)] if ours else []),
                spread([reach(curve, 0.6, "steps") for curve in runs], ".0f", bounds=False),
                spread([reach(curve, 0.6, "seconds") for curve in runs], ".0f", bounds=False),
                f"{statistics.mean(end['tokens'] for end in ends) / 1e3:,.0f}",
                f"{statistics.mean(end['seconds'] / end['iteration'] for end in ends):.1f}",
            ]
        )
    header = ["method", "learning rate", "test pass@1", *["VinePPO's lead"] * bool(ours)]
    header += ["gradient steps to 0.6", "seconds to 0.6"]
    header += ["thousand tokens sampled", f"seconds for {EPISODES} episodes"]
    command = f"python -m analysis.compare --seeds {' '.join(map(str, seeds))}"
    command += "" if grid else " --no-grid"
    command += "" if {*curves} == {*METHODS} else f" --methods {' '.join(curves)}"
    of_seeds = f"Seed {seeds[0]} alone: no interval"
    if len(seeds) > 1:
        of_seeds = f"The mean over seeds {', '.join(map(str, seeds))}; ±: half of a 95 % interval"
        of_seeds += " (Student's t)"
        of_seeds += ". The lead: seed by seed, from the same SFT checkpoint" if ours else ""
    text = f"""<!-- compare -->
Written by `{command}`, {time.strftime("%Y-%m-%d")}, on
{describe_machine()}; {jobs} runs at a time. Each seed has its own SFT checkpoint (test pass@1
{spread(sft)}), from which all methods start. They sample 20 x {EPISODES}
responses, plus rollouts, with the scripts'
defaults{" and the best learning rate of the grid" if grid else ""}.

{table(header, rows)}
{of_seeds}.
Means to 0.6 omit seeds that never reach it, which flatters such rows. Test: 500 problems, 16
responses each; 0.6: 250 validation problems, 4 each, interpolated; temperature 0.35. Seconds and
tokens exclude evaluation, except RestEM's, which decides when to stop (most of its tokens).

{compare_pairs(curves)}![pass@1 by steps and seconds](results.png)

*By `analysis.compare`: mean, lowest and highest seed.*

![pass@1 by KL; training reward](curves.png)

*By `analysis.compare`: exact KL along 100 validation demonstrations; rewards of the next training
samples.*
<!-- end of compare -->
"""
    write_block(f"{output}/results.md", "compare", text)


def compare_pairs(curves: dict[str, list[list[dict[str, float]]]]) -> str:
    """VinePPO's steps as shares of the others', each seed with the same seed."""
    if "vineppo" not in curves:
        return ""
    text = ""
    to_06 = {m: [reach(curve, 0.6, "steps") for curve in runs] for m, runs in curves.items()}
    ours = to_06.pop("vineppo")
    there = {m: theirs for m, theirs in to_06.items() if min(theirs) < float("inf")}
    if there:
        of_method = [f"{NAMES[m]} {shares(ours, theirs)}" for m, theirs in there.items()]
        text += "VinePPO's gradient steps to 0.6, divided by the other's with the same seed:\n"
        text += f"{'; '.join(of_method)} (never: the other does not reach it).\n"
    if "ppo" in curves:
        peaks = [max(point["pass@1"] for point in curve) for curve in curves["ppo"]]
        of_axis = []
        for axis in ("steps", "seconds"):
            ours, theirs = (
                [reach(*pair, axis) for pair in zip(curves[m], peaks, strict=True)]
                for m in ("vineppo", "ppo")
            )
            of_axis.append(f"{axis} {shares(ours, theirs)}")
        text += "To reach the best pass@1 of PPO with the same seed, VinePPO takes, as shares of "
        text += f"PPO's: {'; '.join(of_axis)}.\n"
    return text + "\n"


def write_grid(output: str, scores: dict[str, dict[float, list[float]]], seeds) -> None:
    """The block `grid`, of its own: a comparison without a grid leaves the last one's there."""
    rates = sorted({rate for of_method in scores.values() for rate in of_method})
    rows = [
        [NAMES[m], *(f"{statistics.mean(of[rate]):.3f}" if rate in of else "" for rate in rates)]
        for m, of in scores.items()
    ]
    text = f"""<!-- grid -->
Grid of learning rates, written by `python -m analysis.compare`, {time.strftime("%Y-%m-%d")}: last
pass@1 on validation problems, mean over seeds {", ".join(map(str, seeds))}.

{table(["method", *(f"{rate:.2g}" for rate in rates)], rows)}<!-- end of grid -->
"""
    write_block(f"{output}/results.md", "grid", text)


def write_block(path: str, name: str, text: str) -> None:
    """Puts a marked block in its place; a page that is new begins with a title."""
    write_between(path, f"<!-- {name} -->", f"<!-- end of {name} -->", text, TITLE)


def write_between(path: str, start: str, end: str, text: str, title: str = "") -> None:
    """Replaces what is between the marks in a page by `text`, which has the marks too; the text
    around them stays. A new page gets a title."""
    page = title + text
    if os.path.exists(path):
        with open(path, encoding="utf-8") as file:
            before, _, rest = file.read().partition(start)
        page = before + text + rest.partition(f"{end}\n")[2]
    with open(path, "w", encoding="utf-8") as file:
        file.write(page)


def update_record(path: str, new: dict[str, dict]) -> dict[str, dict]:
    """The entries of a JSON file, which has the new ones from now on."""
    record = {}
    if os.path.exists(path):
        with open(path) as file:
            record = json.load(file)
    if new:
        record |= new
        with open(f"{path}.tmp", "w") as file:
            json.dump(record, file, indent=1)
        os.replace(f"{path}.tmp", path)
    return record


def extend(rates: list[float], best: float) -> bool:
    """Where the best rate is at an edge of the grid, adds one behind it. Whether it did."""
    if best == min(rates):
        rates.append(best / 2)
    elif best == max(rates):
        rates.append(best * 2)
    else:
        return False
    return True


def main(
    seeds: tuple[int, ...] = (1, 2, 3),
    grid: bool = True,
    folder: str = "runs/compare",
    output: str = "docs",
    jobs: int = torch.cuda.device_count() or min(2, os.cpu_count() or 1),
    methods: tuple[str, ...] = tuple(METHODS),
) -> None:
    """--no-grid: the scripts' own learning rates. `output`: where results.md and .png go."""
    os.makedirs(folder, exist_ok=True)
    os.makedirs(output, exist_ok=True)
    make_sft(make_launcher(), *seeds)
    bar = tqdm(unit="run", smoothing=0)
    rates = {m: list(GRID) for m in methods}
    if not grid:
        rates = {m: [importlib.import_module(m).Args().learning_rate] for m in methods}
    while True:
        wanted = [(m, rate, seed) for m in methods for rate in rates[m] for seed in seeds]
        runs = train(wanted, folder, jobs, bar)
        last = {key: read_curve(path, 0.0)[-1]["pass@1"] for key, path in runs.items()}
        scores = {m: {r: [last[m, r, s] for s in seeds] for r in sorted(rates[m])} for m in methods}
        best = {
            m: max(scores[m], key=lambda r, m=m: statistics.mean(scores[m][r])) for m in methods
        }
        # `sum`, since `any` would stop at the first grid that is extended
        if not grid or not sum(extend(rates[m], best[m]) for m in methods):
            break
    paths = {m: [runs[m, best[m], seed] for seed in seeds] for m in methods}
    starts = [sft_folder(seed) for seed in seeds]
    found = evaluate([*starts, *itertools.chain(*paths.values())], "test", [], jobs, bar)
    sft = [found.pop(0) for _ in seeds]
    test = {m: [found.pop(0) for _ in seeds] for m in methods}
    first = evaluate_starts(seeds, jobs, bar)
    curves = {m: [*map(read_curve, paths[m], first)] for m in methods}
    bar.set_postfix_str("KL")
    for i, start in enumerate(starts):
        measure_kl({paths[m][i]: curves[m][i] for m in methods}, f"{start}/hf")
    bar.close()
    write_results(output, curves, best, test, sft, seeds, jobs, grid)
    if grid:
        write_grid(output, scores, seeds)
    with open(f"{folder}/results.json.tmp", "w") as file:  # for analysis/figures.py
        found = {"paths": paths, "best": best, "starts": first, "seeds": seeds, "curves": curves}
        json.dump(found, file)
    os.replace(f"{folder}/results.json.tmp", f"{folder}/results.json")
    draw_results(curves, f"{output}/results.png")
    draw_curves(curves, scores, f"{output}/curves.png")
    print(f"{output}/results.md, results.png, curves.png")


if __name__ == "__main__":
    tyro.cli(main)
