"""Does the map hold in training? VinePPO against GRPO and RLOO with as many responses, sampled
tokens or seconds as VinePPO took, from the map's checkpoints.

    python -m analysis.corners                           the runs that are missing (hours)
    python -m analysis.corners --settings steps4         of one setting

It writes docs/when.md, from docs/corners.json, which has the score of each run.

VinePPO runs with K = 3 and its defaults, at its best learning rate. GRPO and RLOO get, for each
budget, the best rate and the best number of prompts of an iteration (PROMPTS): more prompts of
fewer iterations, or fewer of more. Where a best rate is at an edge of RATES, they are extended
there. All is chosen on seed 1; the table has the seeds behind it. All start from the setting's SFT
checkpoint of seed 1, so the intervals leave out what differs between checkpoints.
"""

import json
import math
import os
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
    write_between,
)
from analysis.curves import read_metrics
from analysis.when import SETTINGS, make

START, END = "<!-- corners -->", "<!-- end of corners -->"
RATES = (6e-5, 1.2e-4, 2.4e-4)
PROMPTS = (8, 32)
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

    def name(self) -> str:
        size = f"{self.num_prompts}x{self.iterations}"
        return f"{self.setting}-{self.method}-{size}-lr{self.rate:g}-seed{self.seed}"

    def command(self, where: str, checkpoints: str) -> list[str]:
        made, folder = f"{checkpoints}/{self.setting}-seed1", f"{where}/{self.name()}"
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


def read(folder: str) -> dict:
    """Of a run: its last pass@1 on validation problems; what VinePPO's responses cost."""
    lines = list(read_metrics(folder))
    found = {"score": [line["eval/pass@1"] for line in lines if "eval/pass@1" in line][-1]}
    if "time/rollouts" in lines[0]:
        found["cost"] = measure_cost(lines)
    return found


def measure_cost(lines: list[dict]) -> dict[str, float]:
    """What a VinePPO response costs, in those of the same run without its rollouts."""
    names = "time/sample", "time/rollouts", "time/logprobs", "time/update"
    names += "tokens/sample", "tokens/rollouts"
    total = {name: sum(line[name] for line in lines) for name in names}
    without = total["time/sample"] + total["time/logprobs"] + total["time/update"]
    return {
        "responses": 1.0,
        "seconds": 1 + total["time/rollouts"] / without,
        "tokens": 1 + total["tokens/rollouts"] / total["tokens/sample"],
    }


def main(
    settings: tuple[str, ...] = ("steps4", "center", "steps16"),
    seeds: tuple[int, ...] = (2, 3, 4, 5, 6),
    folder: str = "runs/corners",
    checkpoints: str = "runs/when",
    output: str = "docs",
    jobs: int = min(2, os.cpu_count() or 1),
) -> None:
    os.makedirs(folder, exist_ok=True)
    os.makedirs(output, exist_ok=True)
    record, file = {}, f"{output}/corners.json"
    if os.path.exists(file):
        with open(file) as stream:
            record = json.load(stream)
    bar = tqdm(unit="run", smoothing=0)

    def train(runs: list[Run]) -> None:
        """Those that are not in the record, which then has them."""
        left = {run: f"{folder}/{run.name()}" for run in runs if run.name() not in record}
        make([(run.setting, 1) for run in left], checkpoints, jobs, measure=False)
        waiting = {r: path for r, path in left.items() if not os.path.exists(f"{path}/finished")}
        commands = {f"{path}.log": r.command(folder, checkpoints) for r, path in waiting.items()}
        run_all(commands, jobs, bar)
        drop_engine_states(left)
        record.update({run.name(): read(path) for run, path in left.items()})
        with open(f"{file}.tmp", "w") as stream:
            json.dump(record, stream, indent=1)
        os.replace(f"{file}.tmp", file)

    def score(run: Run) -> float:
        return record[run.name()]["score"]

    def tune(sizes: list[Run]) -> tuple[Run, list[Run]]:
        """(The best of these at any learning rate, all that were tried)."""
        rates = list(RATES)
        while True:
            runs = [run._replace(rate=rate) for run in sizes for rate in rates]
            train(runs)
            best = max(runs, key=score)
            if not extend(rates, best.rate):
                return best, runs

    rows, tuning = [], []
    for setting in settings:
        ours, tried = tune([Run(setting, "vineppo", 8, ITERATIONS, 0.0, 1)])
        chosen, cost = {("vineppo", "responses"): ours}, record[ours.name()]["cost"]
        for method in ("grpo", "rloo"):
            for budget, times in cost.items():
                sizes = [(p, math.ceil(8 * ITERATIONS * times / p)) for p in PROMPTS]
                best, runs = tune([Run(setting, method, *size, 0.0, 1) for size in sizes])
                chosen[method, budget] = best
                tried += runs
        finals = {k: [run._replace(seed=seed) for seed in seeds] for k, run in chosen.items()}
        train([run for runs in finals.values() for run in runs])
        for (method, budget), runs in finals.items():
            label = f"{NAMES[method]}, equal {budget}" if method != "vineppo" else "VinePPO, K = 3"
            cells = [SETTINGS[setting].label, label, runs[0].size(), f"{runs[0].rate:.2g}"]
            rows.append([*cells, f"{cost[budget]:.1f}", interval([*map(score, runs)])])
        for run in dict.fromkeys(run._replace(rate=0.0) for run in tried):
            of_rate = {r.rate: score(r) for r in tried if r._replace(rate=0.0) == run}
            tuning.append(([SETTINGS[setting].label, NAMES[run.method], run.size()], of_rate))
    bar.close()
    rates = sorted({rate for _, of_rate in tuning for rate in of_rate})
    first = ["setting", "method", "iterations x responses"]
    header = [*first, "learning rate", "times the responses"]
    grid = [
        [*cells, *(f"{of_rate[r]:.3f}" if r in of_rate else "" for r in rates)]
        for cells, of_rate in tuning
    ]
    text = f"""{START}
Written by `python -m analysis.corners`. {describe_machine()}; seeds
{", ".join(map(str, seeds))}: mean ± half of a 95 % interval (Student's t) of the last pass@1 on 250
validation problems, 4 responses each, all from one SFT checkpoint of each setting.

{table([*header, "pass@1"], rows)}
How they were chosen: pass@1 by learning rate, seed 1.

{table([*first, *(f"{rate:.2g}" for rate in rates)], grid)}{END}
"""
    write_between(f"{output}/when.md", START, END, text, "# When does VinePPO pay?\n\n")
    print(text)


if __name__ == "__main__":
    tyro.cli(main)
