"""`make compare`: every method from one SFT checkpoint, on the same number of sampled episodes.

    python -m analysis.compare                            the grid and three seeds: docs/results.md
    python -m analysis.compare --seeds 1 --no-grid --output runs/quick   one seed, default rates

Each method runs with its defaults, at each learning rate of one grid and with each seed. Where a
method's best rate (mean over seeds of the last pass@1 on validation problems) is at an edge of the
grid, the grid is extended there. The runs at the best rates are evaluated on the test problems.

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
from analysis.curves import read_metrics
from common import UsageError, data, require
from recipes.demo import SFT, make_launcher, make_sft

matplotlib.use("Agg")
from matplotlib import pyplot as plt

GRID = [3e-5, 6e-5, 1.2e-4, 2.4e-4]
EVALUATION = ["--eval-problems", "250", "--eval-rounds", "4", "--keep-checkpoints", "1000"]
# Each script's own steps between evaluations; a checkpoint with each, for the KL.
ONLINE = ["--eval-every", "2", "--save-every", "2"]
METHODS = dict.fromkeys(("vineppo", "grpo", "rloo", "ppo"), ONLINE)
METHODS |= {"restem": [], "dpo_pos": ["--eval-every", "12", "--save-every", "12"]}
STYLES = {
    "vineppo": ("VinePPO", "#d55e00"),
    "grpo": ("GRPO", "#0072b2"),
    "rloo": ("RLOO", "#009e73"),
    "ppo": ("PPO", "#cc79a7"),
    "restem": ("RestEM", "#e69f00"),
    "dpo_pos": ("DPO-Positive", "#777777"),
}
NAMES = {method: name for method, (name, _) in STYLES.items()}
COLOURS = {method: colour for method, (_, colour) in STYLES.items()}
EPISODES = 64  # of an iteration of the policy-gradient scripts
START, END = "<!-- compare -->", "<!-- end of compare -->"
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
    with open(f"{SFT}/hf/model.safetensors", "rb") as file:
        weights = hashlib.sha256(file.read()).hexdigest()
    runs, commands = {}, {}
    for key in wanted:
        method, rate, seed, *flags = key
        suffix = "".join(flags).replace("--", "-")
        name = method.removesuffix("_cheap")  # a fork's runs differ in their flags
        path = runs[key] = f"{folder}/{name}-lr{rate:g}-seed{seed}{suffix}"
        is_fork = method not in METHODS
        command = ["-m", f"experiments.{method}"] if is_fork else [f"{method}.py"]
        command += ["--model", f"{SFT}/hf", "--output-dir", path]
        command += ["--seed", str(seed), "--learning-rate", f"{rate:g}"]
        command += [*METHODS.get(method, ONLINE), *EVALUATION, *flags]
        origin = f"{' '.join(command)} of {weights}\n"
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
        apart = ("time/save",) if method == "restem" else ("time/save", "time/evaluate")
        total["seconds"] += line["time/iteration"] - sum(line.get(name, 0) for name in apart)
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
def measure_kl(curves: dict[str, list[dict[str, float]]], temperature: float = 0.6) -> None:
    """Adds KL(policy, SFT checkpoint) to the points of {run: curve}: exact at each token of the
    demonstrations for 100 validation problems, summed over tokens, mean over problems."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, logging

    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(f"{SFT}/hf")
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

    reference = logprobs_of(f"{SFT}/hf")
    for path, curve in curves.items():
        curve[0]["kl"] = 0.0
        for point in curve[1:]:
            policy = logprobs_of(f"{path}/checkpoints/iteration_{point['done']:06d}/hf")
            point["kl"] = (policy.exp() * (policy - reference)).sum().item() / len(encoded)


# ---- writing -------------------------------------------------------------------------------------


def spread(values: list[float], form: str = ".3f") -> str:
    """Mean (lowest to highest); `never` for a seed that does not reach the target."""
    reached = [value for value in values if value != float("inf")]
    if not reached:
        return "never"
    text = f"{statistics.mean(reached):{form}}"
    if len(values) > 1:
        text += f" ({min(reached):{form}} to {max(reached):{form}})"
    missing = len(values) - len(reached)
    return text + (f", {missing} of {len(values)} never" if missing else "")


def draw_band(
    panel, curves: list[list[dict]], axis: str, colour: str, label: str, name: str = "pass@1"
) -> None:
    """The seeds' mean over the mean of `axis`, evaluation by evaluation, between lowest and
    highest."""
    evaluations = itertools.zip_longest(*curves, fillvalue={})
    points = [[p for p in of if axis in p and name in p] for of in evaluations]
    points = [of for of in points if of]
    xs = [statistics.mean(p[axis] for p in of) for of in points]
    ys = [[p[name] for p in of] for of in points]
    panel.plot(xs, [statistics.mean(y) for y in ys], ".-", color=colour, label=label)
    panel.fill_between(
        xs, [min(y) for y in ys], [max(y) for y in ys], color=colour, alpha=0.15, lw=0
    )


def draw(curves: dict[str, list[list[dict]]], grid: dict, output: str) -> None:
    """One panel an axis, seeds as a band, and the learning rates of the grid."""
    figure, panels = plt.subplots(2, 3, figsize=(15, 8.5), layout="constrained")
    axes = {
        "iteration": f"sampled episodes / {EPISODES} (iterations of VinePPO, PPO, GRPO, RLOO)",
        "steps": "gradient steps",
        "seconds": "seconds of training (without evaluation, but for RestEM)",
        "kl": "KL(policy, SFT checkpoint) along a demonstration, nats",
        "reward": "mean reward of its next samples, training prompts, temperature 0.6",
    }
    for panel, (axis, label) in zip(panels.flat, axes.items(), strict=False):
        for method, seeds in curves.items():
            draw_band(panel, seeds, axis, COLOURS[method], NAMES[method])
        panel.set(xlabel=label, ylabel="pass@1, validation, temperature 0.35", ylim=(0, 1))
        panel.grid(alpha=0.3)
    panels.flat[2].set_xscale("symlog", linthresh=10)
    panels.flat[0].legend()
    last = panels.flat[5]
    for method, rates in grid.items():
        xs = sorted(rates)
        means = [statistics.mean(rates[x]) for x in xs]
        last.plot(xs, means, "-", color=COLOURS[method])
        for x in xs:
            last.plot([x] * len(rates[x]), rates[x], ".", color=COLOURS[method], alpha=0.7)
    last.set(xscale="log", xlabel="learning rate", ylabel="last pass@1, validation", ylim=(0, 1))
    last.grid(alpha=0.3)
    save(figure, output)


def save(figure, output: str) -> None:
    """As PNG and, beside it, SVG."""
    figure.savefig(output, dpi=90)
    with plt.rc_context({"svg.hashsalt": "figures"}):  # the same figure, the same file
        figure.savefig(output.removesuffix(".png") + ".svg", metadata={"Date": None})
    plt.close(figure)


def table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def describe_machine() -> str:
    if torch.cuda.is_available():
        return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
    with open("/proc/cpuinfo") as file:
        names = [line.split(":")[1].strip() for line in file if line.startswith("model name")]
    return f"{os.cpu_count()} cores ({names[0] if names else platform.machine()}), no GPU"


def write_results(
    output: str,
    curves: dict[str, list[list[dict[str, float]]]],
    scores: dict[str, dict[float, list[float]]],
    best: dict[str, float],
    test: dict[str, list[float]],
    sft: float,
    seeds: tuple[int, ...],
    jobs: int,
) -> None:
    """Writes results.md between the marks START and END; the text around them stays."""
    peaks = [max(p["pass@1"] for p in curve) for curve in curves.get("ppo", [])]
    rows = []
    for method, runs in curves.items():
        ends = [curve[-1] for curve in runs]
        per_iteration = [end["seconds"] / end["iteration"] for end in ends]
        rows.append(
            [
                NAMES[method],
                f"{best[method]:.2g}",
                spread(test[method]),
                spread([max(point["pass@1"] for point in curve) for curve in runs]),
                *(
                    spread([reach(*pair, axis) for pair in zip(runs, peaks, strict=True)], ".0f")
                    if peaks
                    else "-"
                    for axis in ("steps", "seconds")
                ),
                spread([reach(curve, 0.6, "steps") for curve in runs], ".0f"),
                spread([reach(curve, 0.6, "seconds") for curve in runs], ".0f"),
                spread(per_iteration, ".1f"),
                f"{statistics.mean(end['tokens'] for end in ends) / 1e3:.0f}",
            ]
        )
    header = ["method", "learning rate", "test pass@1, last", "validation pass@1, best"]
    header += ["gradient steps to PPO's peak", "seconds to it", "gradient steps to 0.6"]
    header += ["seconds to it", f"seconds for {EPISODES} episodes", "thousand tokens sampled"]
    rates = sorted({rate for of_method in scores.values() for rate in of_method})
    grid_rows = [
        [NAMES[m], *(spread(of[rate]) if rate in of else "" for rate in rates)]
        for m, of in scores.items()
    ]
    to_06 = {m: [reach(curve, 0.6, "steps") for curve in runs] for m, runs in curves.items()}
    paired = []
    for method, theirs in to_06.items() if "vineppo" in to_06 else ():
        pairs = zip(to_06["vineppo"], theirs, strict=True)
        ratios = [f"{a / b:.2f}" if b < float("inf") else "never" for a, b in pairs]
        paired.append([NAMES[method], *ratios])
    cores = f"{threads_of_a_run(jobs)} of {os.cpu_count()} cores"
    each = "a GPU" if torch.cuda.is_available() else cores
    text = f"""{START}
Written by `python -m analysis.compare` (`make compare`), {time.strftime("%Y-%m-%d")}. Machine:
{describe_machine()}; {jobs} runs at a time, {each} for each.

Embedded task; every run starts from the same SFT checkpoint (pass@1 on the test problems
{sft:.3f}) and samples 20 x {EPISODES} episodes; rollouts come on top. Each script has its defaults,
but for the learning rate, and for 250 validation problems with 4 responses each. Seeds
{", ".join(map(str, seeds))}: the mean (lowest to highest). pass@1 at temperature 0.35; test: 500
problems, 16 responses each.

{table(header, rows)}
Seconds and tokens are without evaluation, but for RestEM, whose walk needs its own. PPO's peak is
that of the same seed's validation curve; where a curve crosses a level is read off a straight line
between two evaluations. RestEM's validation figures are those its walk has chosen by.

VinePPO's gradient steps to 0.6 as a share of the method's own, by seed ("never": the method does
not get there):

{table(["method", *(f"seed {seed}" for seed in seeds)], paired)}
**Learning rates.** The last pass@1 on validation problems; the best mean decides. Where a method's
best lies at an edge of the grid, the grid goes on there. Other settings (PPO's critic,
DPO-Positive's beta and penalty, RestEM's prompts an iteration) were not searched.

{table(["method", *(f"{rate:.2g}" for rate in rates)], grid_rows)}
![Accuracy by episodes, gradient steps, seconds, KL and reward; the grid](results.png)
{END}
"""
    write_between(f"{output}/results.md", START, END, text, "# The methods, compared\n\n")


def write_between(path: str, start: str, end: str, text: str, title: str = "") -> None:
    """Replaces what is between the marks in a page by `text`, which has the marks too; the text
    around them stays. A new page gets a title."""
    page = title + text
    if os.path.exists(path):
        with open(path) as file:
            before, _, rest = file.read().partition(start)
        page = before + text + rest.partition(f"{end}\n")[2]
    with open(path, "w") as file:
        file.write(page)


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
    make_sft(make_launcher())
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
        low = [m for m in methods if grid and best[m] == min(rates[m])]
        high = [m for m in methods if grid and best[m] == max(rates[m])]
        if not low + high:
            break
        for m in low:
            rates[m].append(best[m] / 2)
        for m in high:
            rates[m].append(best[m] * 2)
    paths = {m: [runs[m, best[m], seed] for seed in seeds] for m in methods}
    sft, *found = evaluate([SFT, *itertools.chain(*paths.values())], "test", [], jobs, bar)
    test = {m: [found.pop(0) for _ in seeds] for m in methods}
    options = ["--split", "validation", "--num-problems", "250", "--rounds", "4"]
    (start,) = evaluate([SFT], "validation", options, jobs, bar)
    curves = {m: [read_curve(path, start) for path in paths[m]] for m in methods}
    bar.set_postfix_str("KL")
    measure_kl({path: c for m in methods for path, c in zip(paths[m], curves[m], strict=True)})
    bar.close()
    write_results(output, curves, scores, best, test, sft, seeds, jobs)
    with open(f"{folder}/results.json.tmp", "w") as file:  # for analysis/figures.py
        found = {"paths": paths, "best": best, "start": start, "seeds": seeds, "curves": curves}
        json.dump(found, file)
    os.replace(f"{folder}/results.json.tmp", f"{folder}/results.json")
    draw(curves, scores, f"{output}/results.png")
    print(f"{output}/results.md")


if __name__ == "__main__":
    tyro.cli(main)
