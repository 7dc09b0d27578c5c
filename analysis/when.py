"""When does VinePPO pay? The map of docs/when.md: kin of the embedded task, with what a response
should be worth there, and what it is worth.

    python -m analysis.when                 what is missing of seeds 1, 2, 3 (hours; can be stopped)
    python -m analysis.when --seeds 1 --settings steps4            of one seed, of one setting
    python -m analysis.when --seeds         only draws

The map has all of docs/when.json: what analysis/worth.py found, by setting and seed.

With groups of G, a response with K rollouts from each of S states samples n times the tokens of one
without, n = 1 + K ((S + 1) / 2 - (G - 1) / G), as a group shares the rollouts from its prompt.
With `price`, the cost of a sampled token in those of training on one, it costs

    cost = (price n + 1) / (price + 1)

of RLOO's, and pays where it is worth more (analysis/worth.py): price < (W - 1) / (n - W).
"""

import json
import os
import statistics
from typing import NamedTuple

import tyro
from tqdm import tqdm

from analysis import predict
from analysis.compare import (
    describe_machine,
    interval,
    legend_above,
    plt,
    run_all,
    save,
    table,
    update_record,
    use_log_axis,
    write_between,
)
from common import require
from tasks import chain

START, END = "<!-- map -->", "<!-- end of map -->"
BASE = "base"  # makes no mistakes: there it is learnt to copy and to calculate
KS = {0: ("exact values", "#000000", "o"), 9: ("K = 9", "#d55e00", "s")}  # label, colour, marker
KS |= {3: ("K = 3", "#0072b2", "^"), 1: ("K = 1", "#009e73", "D")}
OTHERS = ("GRPO", "smoothing and reuse", "unsure", "tree")


class Setting(NamedTuple):
    label: str  # what is different from the center
    operations: int = 8
    slip: float = 0.35
    weak: float = 0.5
    words: int = 1
    lost: bool = False
    start: str = BASE  # whose checkpoint it starts from
    epochs: float = 0.24
    learning_rate: float = 1e-3

    def problems(self) -> dict:
        return {key: getattr(self, key) for key in ("operations", "slip", "weak", "words", "lost")}

    def lengths(self) -> tuple[int, int]:
        """Limits in tokens: of a response, half as much again as a solution; with its prompt."""
        response = (self.operations * (6 + 2 * self.words) + 3) * 3 // 2
        return response, 2 * self.operations + 4 + response


SETTINGS = {
    BASE: Setting("", slip=0.0, start="", epochs=0.72, learning_rate=3e-3),
    "steps4": Setting("4 operations", operations=4, slip=0.5),
    "center": Setting("8 operations"),
    "steps16": Setting("16 operations", operations=16, slip=0.25, epochs=0.72),
    "steps32": Setting("32 operations", operations=32, slip=0.18, start="steps16", epochs=0.72),
    "right02": Setting("mistakes stay, many", slip=0.65, lost=True),
    "right1": Setting("more mistakes", slip=0.5),
    "right7": Setting("fewer mistakes", slip=0.2),
    "right9": Setting("few mistakes", slip=0.1),
    "weak25": Setting("a quarter of facts weak", weak=0.25, slip=0.5),
    "weak100": Setting("all facts weak", weak=1.0, slip=0.25),
    "words0": Setting("no filler words", words=0, epochs=0.72),
    "words3": Setting("three times as many", words=3),
    "lost": Setting("mistakes stay", slip=0.25, lost=True),
}
LENGTHS = ("steps4", "center", "steps16", "steps32")
LEARNED = 0.9  # of its responses are chains; otherwise SFT failed, and exact values are not its own


# ---- making --------------------------------------------------------------------------------------


def commands(name: str, seed: int, folder: str) -> list[tuple[str, list[str]]]:
    """(file that it writes, command): the setting's problems, its checkpoint, its worth."""
    setting, run = SETTINGS[name], f"{folder}/{name}-seed{seed}"
    response, whole = map(str, setting.lengths())
    write = ["-m", "recipes.chains", f"{run}/problems", "--seed", str(seed)]
    for key, value in setting.problems().items():
        write += [f"--{key}", str(value)]
    start = f"{folder}/{setting.start}-seed{seed}/sft/hf"
    model = start if setting.start else f"{run}/problems/new"
    data = ["--task", "jsonl", "--data-dir", f"{run}/problems", "--max-model-len", whole]
    data += ["--seed", str(seed)]
    learn = ["sft.py", "--model", model, "--output-dir", f"{run}/sft", "--eval-every", "0", *data]
    learn += ["--num-epochs", str(setting.epochs), "--learning-rate", str(setting.learning_rate)]
    learn += ["--resume", "auto" if os.path.exists(f"{run}/sft/args.json") else "no"]
    measure = ["-m", "analysis.worth", "--model", f"{run}/sft/hf", "--output", f"{run}/worth.json"]
    measure += [*data, "--max-response-len", response]
    found = [(f"{run}/problems/new/model.safetensors", write), (f"{run}/sft/finished", learn)]
    return found + [(f"{run}/worth.json", measure)] * (name != BASE)


def made_for(name: str) -> list[dict]:
    """The setting without its label, and those of the checkpoints that it starts from."""
    of = []
    while name:
        of.append(SETTINGS[name]._asdict() | {"label": ""})
        name = SETTINGS[name].start
    return of


def check_settings(run: str, name: str) -> None:
    """Writes down what the folder is made for. Raises UsageError if that was something else, or
    was not written down."""
    file = f"{run}/settings.json"
    if not os.path.exists(run):
        os.makedirs(f"{run}.tmp", exist_ok=True)
        with open(f"{run}.tmp/settings.json", "w") as stream:
            json.dump(made_for(name), stream)
        os.rename(f"{run}.tmp", run)
    known = None
    if os.path.exists(file):
        with open(file) as stream:
            known = json.load(stream)
    others = f"{run} is of other settings ({file}): remove it or use --folder"
    require(known == made_for(name), others)


def make(wanted: list[tuple[str, int]], folder: str, jobs: int, measure: bool = True) -> None:
    """Runs what is missing of each (setting, seed): a checkpoint after the one that it starts from.
    Raises UsageError if SETTINGS have changed since a folder was made."""
    needed = [*wanted]
    for name, seed in needed:  # and the ones that they start from
        if (start := (SETTINGS[name].start, seed)) not in needed and start[0]:
            needed.append(start)
        check_settings(f"{folder}/{name}-seed{seed}", name)
    bar = tqdm(unit="command", smoothing=0)
    waiting = {key: commands(*key, folder) for key in needed}
    for key, of in waiting.items():
        if not measure or key not in wanted:
            del of[2:]
    while any(waiting.values()):
        ready = {}
        for (name, seed), left in waiting.items():
            while left and os.path.exists(left[0][0]):
                left.pop(0)
            start = SETTINGS[name].start
            if left and (not start or os.path.exists(f"{folder}/{start}-seed{seed}/sft/finished")):
                ready[f"{folder}/{name}-seed{seed}.log"] = left[0]
        run_all({log: command for log, (_, command) in ready.items()}, jobs, bar)
        for log, (file, _) in ready.items():
            require(os.path.exists(file), f"{file} was not written: {log} says why")
    bar.close()


# ---- reading -------------------------------------------------------------------------------------


def current(record: dict[str, dict]) -> dict[str, dict]:
    """The entries whose settings are still the same."""
    found = {}
    for key, one in record.items():
        name = key.partition("-seed")[0]
        if name in SETTINGS and one["made_for"] == made_for(name):
            found[key] = one
        else:
            print(f"{key} is left out: its settings have changed")
    return found


def worth_at(report: dict, k: float, figure: str = "worth") -> float:
    """W of K rollouts (0: of exact values). Noise is a + b / K: a line through exact values and all
    K of the report, by least squares. `figure`: worth, as measured, or expected."""
    of = report["estimators"]
    points = [(0.0, 1 / of["exact values"][figure])]
    for name, ours in of.items():
        if name.startswith("VinePPO, K = "):
            points.append((1 / int(name.removeprefix("VinePPO, K = ")), 1 / ours[figure]))
    b, a = statistics.linear_regression(*zip(*points, strict=True))
    return 1 / (a + b / k if k else a)


def tokens_at(report: dict, k: float) -> float:
    """Tokens that a response with K rollouts from each state samples, in RLOO's."""
    return 1 + (report["estimators"]["VinePPO, K = 3"]["tokens"] - 1) * k / 3


def cost(tokens: float, price: float) -> float:
    """Of a response that samples so many times the tokens, in RLOO's responses."""
    return (price * tokens + 1) / (price + 1)


def price_limit(worth: float, tokens: float) -> float:
    """The price below which it pays: where worth = cost. 0: at none; inf: at every price."""
    if worth <= 1:
        return 0.0
    return (worth - 1) / (tokens - worth) if tokens > worth else float("inf")


def best_limit(report: dict) -> tuple[float, int]:
    """The highest price at which some K pays, and this K."""
    return max((price_limit(worth_at(report, k), tokens_at(report, k)), k) for k in range(1, 21))


def measured(reports: list[dict], name: str) -> str:
    """W: mean and interval over SFT seeds; of one seed, ± the jackknife's standard error."""
    of = [report["estimators"][name] for report in reports]
    if len(of) > 1:
        return interval([ours["worth"] for ours in of], ".2f")
    return f"{of[0]['worth']:.2f} ± {of[0]['error']:.2f}"


def papers_price(ppo: float, vineppo: float, k: float = 9, steps: float = 9.8) -> float:
    """From the seconds of an iteration in the paper's Table 4, if critic and policy train alike and
    its responses have as many steps as MATH's solutions: ppo = sampling + 2 trainings, vineppo =
    n x sampling + 1 training. What else an iteration does counts as training."""
    tokens = 1 + k * ((steps + 1) / 2 - 7 / 8)  # groups of 8
    sampling = (vineppo - ppo / 2) / (tokens - 0.5)
    return sampling / ((ppo - sampling) / 2)


PRICES = {"paper, 1.1B": papers_price(80, 380), "paper, 7B": papers_price(312, 583)}


def expect(setting: Setting) -> dict[float, float]:
    """W by K (0: exact values) of the demonstrator's table, before anything is trained."""
    splits = chain.make_splits(**setting.problems())
    facts = predict.demonstrators_table(splits["sft"][:8000], 0.6)
    noise, _ = predict.simulate(splits["train"][:200], facts)
    weights = {"results": 1.0, "words": 2 * setting.words * (1 - 1 / len(chain.FILLERS))}
    return {k: predict.predict(noise, k, weights) for k in KS}


# ---- writing -------------------------------------------------------------------------------------


def make_tables(found: dict[str, list[dict]], before: dict[str, dict[float, float]]) -> str:
    rows, others = [], []
    for name, reports in found.items():
        label = SETTINGS[name].label
        cells = [label, str(len(reports)), f"{statistics.mean(r['reward'] for r in reports):.2f}"]
        by_line = interval([worth_at(r, 9) for r in reports], ".2f")
        for k, found_w in ((3, measured(reports, "VinePPO, K = 3")), (9, by_line)):
            after = statistics.mean(worth_at(r, k, "expected") for r in reports)
            cells += [f"{before[name][k]:.1f}, {after:.1f}", found_w]
        cells.append(f"{statistics.mean(tokens_at(r, 3) for r in reports):.1f}")
        limits, best = zip(*map(best_limit, reports), strict=True)
        rows.append([*cells, f"{interval([*limits], '.3f')} ({', '.join(map(str, best))})"])
        cells = [label]
        for other in OTHERS:
            of = [r["estimators"][other] for r in reports]
            tokens = statistics.mean(ours["tokens"] for ours in of)
            cells.append(f"{measured(reports, other)} for {tokens:.1f}")
        others.append(cells)
    header = [
        "setting",
        "seeds",
        "reward",
        "W, K = 3: expected",
        "measured",
        "W, K = 9: expected",
        "by a line",
    ]
    text = table([*header, "tokens, K = 3", "pays below a price of (best K)"], rows)
    return f"{text}\n{table(['setting', *OTHERS], others)}"


def draw_lengths(found: dict[str, list[dict]], before: dict[str, dict], output: str) -> None:
    """W by the number of steps, and the price below which VinePPO pays."""
    figure, panels = plt.subplots(1, 2, figsize=(8.8, 3.9), layout="constrained")
    names = [name for name in LENGTHS if name in found]
    steps = [found[name][0]["steps"] for name in names]
    for k, (label, colour, marker) in KS.items():
        for name, x in zip(names, steps, strict=True):
            ys = [worth_at(report, k) for report in found[name]]
            shown = label if name == names[0] else None
            panels[0].plot([x] * len(ys), ys, marker, color=colour, label=shown)
        panels[0].plot(steps, [before[name][k] for name in names], ":", color=colour)
        after = [[worth_at(report, k, "expected") for report in found[name]] for name in names]
        panels[0].plot(steps, [statistics.mean(ys) for ys in after], "-", color=colour)
    panels[0].axhline(1, color="#777777", lw=0.8)
    panels[0].set(xlabel="reasoning steps", yscale="log")
    panels[0].set_title("what a response is worth, in RLOO's")
    panels[0].yaxis.set_major_formatter(lambda y, _: f"{y:g}")
    use_log_axis(panels[0].xaxis)
    limits = [[best_limit(report)[0] for report in found[name]] for name in names]
    for x, ys in zip(steps, limits, strict=True):
        panels[1].plot([x] * len(ys), ys, "o", color="#d55e00")
    panels[1].plot(steps, [statistics.mean(ys) for ys in limits], color="#d55e00")
    for label, price in PRICES.items():
        panels[1].axhline(price, color="#777777", lw=0.8)
        panels[1].text(steps[0], price, label, va="bottom", color="#555555")
    panels[1].set(xlabel="reasoning steps", ylim=(0, None))
    panels[1].set_title("price below which some K pays")
    use_log_axis(panels[1].xaxis)
    legend_above(figure, panels[0])
    save(figure, f"{output}/when.png")


def draw_settings(found: dict[str, list[dict]], before: dict[str, dict], output: str) -> None:
    """W with nine rollouts in all settings: as expected twice, and by the line."""
    figure, panel = plt.subplots(figsize=(8.8, 4.6), layout="constrained")
    for i, (name, reports) in enumerate(reversed(found.items())):
        first = i == 0
        after = statistics.mean(worth_at(report, 9, "expected") for report in reports)
        ys = [i] * len(reports)
        label = "expected before training" if first else None
        panel.plot(before[name][9], i, "D", mfc="none", color="#777777", label=label)
        label = "expected of the checkpoint" if first else None
        panel.plot(after, i, "D", color="#0072b2", label=label)
        by_line = [worth_at(report, 9) for report in reports]
        panel.plot(by_line, ys, "o", color="#d55e00", label="by a line" if first else None)
    labels = [SETTINGS[name].label for name in reversed(found)]
    panel.set_yticks(range(len(labels)), labels)
    panel.set(xlabel="what a response with K = 9 is worth, in RLOO's", xlim=(0, None))
    legend_above(figure, panel)
    save(figure, f"{output}/when_settings.png")


def main(
    seeds: tuple[int, ...] = (1, 2, 3),
    settings: tuple[str, ...] = tuple(SETTINGS),
    folder: str = "runs/when",
    output: str = "docs",
    jobs: int = min(2, os.cpu_count() or 1),
) -> None:
    os.makedirs(folder, exist_ok=True)
    os.makedirs(output, exist_ok=True)
    path = f"{output}/when.json"
    known = current(update_record(path, {}))
    wanted = [(name, seed) for name in settings if name != BASE for seed in seeds]
    wanted = [(name, seed) for name, seed in wanted if f"{name}-seed{seed}" not in known]
    make(wanted, folder, jobs)
    new = {}
    for name, seed in wanted:
        with open(f"{folder}/{name}-seed{seed}/worth.json") as file:
            report = json.load(file)
        made = {"made_for": made_for(name), "machine": describe_machine(), "report": report}
        new[f"{name}-seed{seed}"] = made
    update_record(path, new)
    known |= new
    require(known, f"{path} has no figures yet: name a seed, as in --seeds 1")
    not_learned = [key for key, one in known.items() if one["report"]["chains"] < LEARNED]
    found: dict[str, list[dict]] = {}
    for name in SETTINGS:
        keys = sorted(key for key in known if key.startswith(f"{name}-seed"))
        of = [known[key]["report"] for key in keys if key not in not_learned]
        if of:
            found[name] = of
    before = {name: expect(SETTINGS[name]) for name in found}
    machines = sorted({one["machine"] for one in known.values()})
    text = f"""{START}
Written by `python -m analysis.when` from [when.json](when.json).
{"; ".join(machines)}.
Mean ± half of a 95 % interval over SFT seeds (of one seed, ± a standard error). By a line: through
1 / W of exact values, K = 1 and K = 3. Left out (under 90 % of the responses are chains):
{", ".join(sorted(not_learned)) or "none"}.

{make_tables(found, before)}{END}
"""
    write_between(f"{output}/when.md", START, END, text, "# When does VinePPO pay?\n\n")
    if len({*LENGTHS} & {*found}) > 1:
        draw_lengths(found, before, output)
    draw_settings(found, before, output)
    print(text)


if __name__ == "__main__":
    tyro.cli(main)
