"""Does the map hold in training? VinePPO against GRPO and RLOO with as many responses, sampled
tokens or seconds as VinePPO took, from the map's checkpoints.

    python -m analysis.corners                           the settings that are missing (hours)
    python -m analysis.corners --settings steps4         one of them, if it is missing

The tables in docs/when.md have all settings of docs/corners.json, each made on one machine.

VinePPO runs with K = 3 and its defaults, at its best learning rate. GRPO and RLOO get, for each
budget, the best rate and the best number of prompts of an iteration (PROMPTS): more prompts of
fewer iterations, or fewer of more. Where a best rate is at an edge of RATES, they are extended
there. All is chosen on the seeds TUNING (on one alone, RLOO got a rate that is bad on others); the
table has the seeds behind it. All start from the setting's SFT checkpoint of seed 1, so the
intervals leave out what differs between checkpoints.
"""

import math
import os
import statistics
from typing import NamedTuple

import tyro
from tqdm import tqdm

from analysis.compare import (
    NAMES,
    describe_machine,
    drop_engine_states,
    extend,
    interval,
    run_all,
    table,
    update_record,
    write_between,
)
from analysis.curves import read_metrics
from analysis.when import SETTINGS, current, made_for, make
from common import require

START, END = "<!-- corners -->", "<!-- end of corners -->"
RATES = (6e-5, 1.2e-4, 2.4e-4)
PROMPTS = (8, 32)
TUNING = (1, 7)
ITERATIONS, GROUP = 10, 8  # of VinePPO: 10 iterations of 8 x 8 responses
EVALUATION = ["--eval-problems", "250", "--eval-rounds", "4", "--keep-checkpoints", "1"]


class Run(NamedTuple):
    setting: str
    method: str
    num_prompts: int
    iterations: int
    rate: float
    seed: int

    def size(self) -> str:
        return f"{self.iterations} x {self.num_prompts * GROUP}"

    def folder(self, where: str) -> str:
        """Beside the checkpoint: whoever removes that removes its runs."""
        size = f"{self.num_prompts}x{self.iterations}-lr{self.rate:g}"
        return f"{where}/{self.setting}-seed1/corners/{self.method}-{size}-seed{self.seed}"

    def command(self, where: str) -> list[str]:
        made, folder = f"{where}/{self.setting}-seed1", self.folder(where)
        response, whole = map(str, SETTINGS[self.setting].lengths())
        flags = ["--task", "jsonl", "--data-dir", f"{made}/problems", "--model", f"{made}/sft/hf"]
        flags += ["--max-response-len", response, "--max-model-len", whole, *EVALUATION]
        flags += ["--num-prompts", str(self.num_prompts), "--seed", str(self.seed)]
        flags += ["--num-iterations", str(self.iterations), "--learning-rate", f"{self.rate:g}"]
        flags += ["--minibatch-size", str(2 * self.num_prompts)]  # four minibatches, as VinePPO has
        flags += ["--eval-every", str(self.iterations), "--save-every", str(self.iterations)]
        flags += ["--k", "3"] if self.method == "vineppo" else []
        resume = "auto" if os.path.exists(f"{folder}/args.json") else "no"
        return [f"{self.method}.py", *flags, "--output-dir", folder, "--resume", resume]


def train(runs: list[Run], where: str, jobs: int, bar: tqdm) -> None:
    left = [run for run in runs if not os.path.exists(f"{run.folder(where)}/finished")]
    run_all({f"{run.folder(where)}.log": run.command(where) for run in left}, jobs, bar)
    drop_engine_states({run: run.folder(where) for run in runs})


def score(run: Run, where: str) -> float:
    """Its last pass@1 on validation problems."""
    return [x["eval/pass@1"] for x in read_metrics(run.folder(where)) if "eval/pass@1" in x][-1]


def measure_cost(folder: str) -> dict[str, float]:
    """What a VinePPO response costs, in those of the same run without its rollouts."""
    names = "time/sample", "time/rollouts", "time/logprobs", "time/update"
    names += "tokens/sample", "tokens/rollouts"
    lines = list(read_metrics(folder))
    total = {name: sum(line[name] for line in lines) for name in names}
    without = total["time/sample"] + total["time/logprobs"] + total["time/update"]
    return {
        "responses": 1.0,
        "seconds": 1 + total["time/rollouts"] / without,
        "tokens": 1 + total["tokens/rollouts"] / total["tokens/sample"],
    }


def compare(setting: str, seeds: tuple[int, ...], where: str, jobs: int, bar: tqdm) -> dict:
    """What docs/corners.json has of a setting: rows of the two tables."""

    def tuned(run: Run) -> float:
        return statistics.mean(score(run._replace(seed=seed), where) for seed in TUNING)

    def tune(sizes: list[Run]) -> tuple[Run, list[Run]]:
        """(The best of these at any learning rate, all that were tried)."""
        rates = list(RATES)
        while True:
            runs = [run._replace(rate=rate) for run in sizes for rate in rates]
            train([r._replace(seed=seed) for r in runs for seed in TUNING], where, jobs, bar)
            best = max(runs, key=tuned)
            if not extend(rates, best.rate):
                return best, runs

    make([(setting, 1)], where, jobs, measure=False)
    os.makedirs(f"{where}/{setting}-seed1/corners", exist_ok=True)
    ours, tried = tune([Run(setting, "vineppo", 8, ITERATIONS, 0.0, TUNING[0])])
    chosen, cost = {("vineppo", "responses"): ours}, measure_cost(ours.folder(where))
    for method in ("grpo", "rloo"):
        for budget, times in cost.items():
            sizes = [(p, math.ceil(8 * ITERATIONS * times / p)) for p in PROMPTS]
            best, runs = tune([Run(setting, method, *size, 0.0, TUNING[0]) for size in sizes])
            chosen[method, budget] = best
            tried += runs
    finals = {k: [run._replace(seed=seed) for seed in seeds] for k, run in chosen.items()}
    train([run for runs in finals.values() for run in runs], where, jobs, bar)
    rows, tuning = [], []
    for (method, budget), runs in finals.items():
        label = f"{NAMES[method]}, equal {budget}" if method != "vineppo" else "VinePPO, K = 3"
        row = {"label": label, "size": runs[0].size(), "rate": runs[0].rate}
        rows.append(row | {"times": cost[budget], "scores": [score(r, where) for r in runs]})
    for run in dict.fromkeys(run._replace(rate=0.0) for run in tried):
        of_rate = {r.rate: tuned(r) for r in tried if r._replace(rate=0.0) == run}
        tuning.append({"label": NAMES[run.method], "size": run.size(), "by rate": of_rate})
    return {"rows": rows, "tuning": tuning}


def write(record: dict[str, dict], output: str) -> None:
    """The block `corners` of docs/when.md."""
    rows, grid = [], []
    tuning = [(name, row) for name, of in record.items() for row in of["tuning"]]
    rates = sorted({float(rate) for _, row in tuning for rate in row["by rate"]})
    for name, of in record.items():
        for row in of["rows"]:
            cells = [SETTINGS[name].label, row["label"], row["size"], f"{row['rate']:.2g}"]
            rows.append([*cells, f"{row['times']:.1f}", interval(row["scores"])])
    for name, row in tuning:
        of_rate = {float(rate): f"{found:.3f}" for rate, found in row["by rate"].items()}
        cells = [SETTINGS[name].label, row["label"], row["size"]]
        grid.append([*cells, *(of_rate.get(rate, "") for rate in rates)])
    machines = sorted({of["machine"] for of in record.values()})
    seeds = sorted({", ".join(map(str, of["seeds"])) for of in record.values()})
    first = ["setting", "method", "iterations x responses"]
    header = [*first, "learning rate", "times the responses", "pass@1"]
    text = f"""{START}
Written by `python -m analysis.corners`. {"; ".join(machines)}; seeds
{"; ".join(seeds)}: last pass@1 (250 validation problems, 4 responses each), ± half of a 95 %
interval.

{table(header, rows)}
How they were chosen: pass@1 by learning rate, mean of seeds {", ".join(map(str, TUNING))}.

{table([*first, *(f"{rate:.2g}" for rate in rates)], grid)}{END}
"""
    write_between(output, START, END, text, "# When does VinePPO pay?\n\n")
    print(text)


def main(
    settings: tuple[str, ...] = ("steps4", "center", "steps16"),
    seeds: tuple[int, ...] = (2, 3, 4, 5, 6),
    folder: str = "runs/when",
    output: str = "docs",
    jobs: int = min(2, os.cpu_count() or 1),
) -> None:
    os.makedirs(output, exist_ok=True)
    path = f"{output}/corners.json"
    record = update_record(path, {})
    bar = tqdm(unit="run", smoothing=0)
    for setting in settings:
        made, known = {"made_for": made_for(setting), "seeds": [*seeds]}, record.get(setting, {})
        if known | made != known:
            made |= {"machine": describe_machine(), **compare(setting, seeds, folder, jobs, bar)}
            record = update_record(path, {setting: made})
    bar.close()
    record = current(record)
    require(record, f"{path} has no figures yet: name --settings")
    write({name: record[name] for name in SETTINGS if name in record}, f"{output}/when.md")


if __name__ == "__main__":
    tyro.cli(main)
