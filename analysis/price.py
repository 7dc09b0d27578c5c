"""The price of credit: tokens sampled and seconds until pass@1 on held-out problems reaches 0.8.

    python -m analysis.price            makes the runs that are missing (hours); docs/credit.md

Embedded task, three seeds, every scheme at the best of the learning rates given below: that at
which most seeds get there, and of those the one with the fewest tokens.
"""

import os
import statistics
import time

import tyro
from tqdm import tqdm

from analysis.compare import (
    describe_machine,
    evaluate_starts,
    reach,
    read_curve,
    spread,
    table,
    threads_of_a_run,
    train,
    write_between,
)
from recipes.demo import make_launcher, make_sft

START, END = "<!-- price -->", "<!-- end of price -->"
PLAIN = ("--no-share-rollouts", "--k")
LONG = ("--num-iterations", "40")
BEST, RATES, GRID = (6e-5,), (6e-5, 1.2e-4), (3e-5, 6e-5, 1.2e-4)


def ours(k: int) -> tuple[str, ...]:
    return ("--k", str(k), "--smoothing", ".5", "--reuse-responses")


SCHEMES: dict[str, tuple[str, tuple[str, ...], tuple[float, ...]]] = {
    # one rate: the best of docs/results.md's grid, for VinePPO that of K = 9
    "plain, K = 9": ("vineppo_cheap", (*PLAIN, "9"), BEST),
    "plain, K = 5": ("vineppo_cheap", (*PLAIN, "5"), GRID),
    "plain, K = 3": ("vineppo_cheap", (*PLAIN, "3"), GRID),
    "sharing, K = 3": ("vineppo", ("--k", "3"), GRID),
    "smoothing alone, K = 3": ("vineppo_cheap", (*PLAIN, "3", "--smoothing", ".5"), BEST),
    "smoothing and reuse, K = 3": ("vineppo_cheap", ours(3), GRID),
    "smoothing and reuse, K = 2": ("vineppo_cheap", ours(2), RATES),
    "smoothing and reuse, K = 1": ("vineppo_cheap", ours(1), BEST),
    "GRPO, 40 iterations": ("grpo", LONG, GRID),
    "RLOO, 40 iterations": ("rloo", LONG, GRID),
    "PPO, 40 iterations": ("ppo", LONG, RATES),
    "RestEM, 8 iterations": ("restem", ("--num-iterations", "8"), BEST),
}


def main(
    seeds: tuple[int, ...] = (1, 2, 3),
    target: float = 0.8,
    folder: str = "runs/credit",
    output: str = "docs/credit.md",
    jobs: int = min(2, os.cpu_count() or 1),
) -> None:
    os.makedirs(folder, exist_ok=True)
    make_sft(make_launcher(), *seeds)
    bar = tqdm(unit="run", smoothing=0)
    keys = {
        (name, rate, seed): (script, rate, seed, *flags)
        for name, (script, flags, rates) in SCHEMES.items()
        for rate in rates
        for seed in seeds
    }
    runs = train(list(keys.values()), folder, jobs, bar)
    starts = evaluate_starts(seeds, jobs, bar)
    bar.close()
    rows = []
    for name, (_, _, rates) in SCHEMES.items():
        paths = {r: [runs[keys[name, r, s]] for s in seeds] for r in rates}
        of_rate = {r: [*map(read_curve, paths[r], starts)] for r in rates}

        def price(rate, of_rate=of_rate):
            tokens = [reach(curve, target, "tokens") for curve in of_rate[rate]]
            there = [x for x in tokens if x < float("inf")]
            return -len(there), statistics.mean(there) if there else 0

        best = min(rates, key=price)
        curves = of_rate[best]
        there = [curve for curve in curves if reach(curve, target, "tokens") < float("inf")]
        thousands = [reach(curve, target, "tokens") / 1e3 for curve in there]
        seconds = [reach(curve, target, "seconds") for curve in there]
        rows.append(
            [
                name,
                f"{best:.2g}",
                spread([curve[-1]["pass@1"] for curve in curves]),
                str(len(there)),
                spread(thousands, ",.0f"),
                f"{statistics.mean(seconds):.0f}" if there else "never",
            ]
        )
    header = ["scheme", "learning rate", "last pass@1", f"seeds that reach {target}"]
    header += ["thousand tokens to it", "seconds to it"]
    text = f"""{START}
Written by `python -m analysis.price`, {time.strftime("%Y-%m-%d")}. {describe_machine()}; {jobs}
runs at a time, {threads_of_a_run(jobs)} of {os.cpu_count()} cores each. Seeds
{", ".join(map(str, seeds))}, each from its own SFT checkpoint: mean (lowest to
highest); tokens and seconds of those that reach {target}, without evaluation (RestEM: with).
pass@1: 250 validation problems, 4 responses,
temperature 0.35, every second iteration, interpolated (RestEM: 320 responses to the problems that
choose its checkpoint). 20 iterations unless said.

{table(header, rows)}{END}
"""
    write_between(output, START, END, text)
    print(text)


if __name__ == "__main__":
    tyro.cli(main)
