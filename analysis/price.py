"""The price of credit: tokens sampled and seconds until pass@1 on held-out problems reaches 0.8.

    python -m analysis.price            makes the runs that are missing (hours); docs/credit.md

Embedded task, three seeds, every scheme at the best of its learning rates below: the one at which
most seeds reach 0.8 and, among equals, the one with the fewest tokens. The table marks seeds that
do not reach it in their schedule.
"""

import os
import statistics
import time

import tyro
from tqdm import tqdm

from analysis.compare import (
    SFT,
    describe_machine,
    evaluate,
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
    "equal prefixes once, K = 3": ("vineppo", ("--k", "3"), GRID),
    "smoothing alone, K = 3": ("vineppo_cheap", (*PLAIN, "3", "--smoothing", ".5"), BEST),
    "smoothing and reuse, K = 3": ("vineppo_cheap", ours(3), GRID),
    "smoothing and reuse, K = 2": ("vineppo_cheap", ours(2), RATES),
    "smoothing and reuse, K = 1": ("vineppo_cheap", ours(1), BEST),
    "GRPO, 40 iterations": ("grpo", LONG, GRID),
    "RLOO, 40 iterations": ("rloo", LONG, GRID),
    "PPO, 40 iterations": ("ppo", LONG, RATES),
    "RestEM, 8 iterations of its own": ("restem", ("--num-iterations", "8"), BEST),
}


def main(
    seeds: tuple[int, ...] = (1, 2, 3),
    target: float = 0.8,
    folder: str = "runs/credit",
    output: str = "docs/credit.md",
    jobs: int = min(2, os.cpu_count() or 1),
) -> None:
    os.makedirs(folder, exist_ok=True)
    make_sft(make_launcher())
    bar = tqdm(unit="run", smoothing=0)
    keys = {
        (name, rate, seed): (script, rate, seed, *flags)
        for name, (script, flags, rates) in SCHEMES.items()
        for rate in rates
        for seed in seeds
    }
    runs = train(list(keys.values()), folder, jobs, bar)
    options = ["--split", "validation", "--num-problems", "250", "--rounds", "4"]
    (start,) = evaluate([SFT], "validation", options, jobs, bar)
    bar.close()
    rows = []
    for name, (_, _, rates) in SCHEMES.items():
        of_rate = {r: [read_curve(runs[keys[name, r, s]], start) for s in seeds] for r in rates}

        def last(rate, of_rate=of_rate):
            return [curve[-1]["pass@1"] for curve in of_rate[rate]]

        def price(rate, of_rate=of_rate):
            tokens = [reach(curve, target, "tokens") for curve in of_rate[rate]]
            there = [x for x in tokens if x < float("inf")]
            return -len(there), statistics.mean(there) if there else 0

        best = min(rates, key=price)
        others = [f"{r:.2g}: {statistics.mean(last(r)):.3f}" for r in rates if r != best]
        curves = of_rate[best]
        to_target = [
            spread([reach(curve, target, axis) / scale for curve in curves], form)
            for axis, scale, form in (
                ("iteration", 1, ".1f"),
                ("tokens", 1e3, ",.0f"),
                ("seconds", 1, ".0f"),
            )
        ]
        rows.append([name, f"{best:.2g}", ", ".join(others), spread(last(best)), *to_target])
    header = ["scheme", "learning rate", "last pass@1 at the others", "last pass@1"]
    header += [f"iterations (64 responses) to {target}"]
    header += ["thousand tokens sampled to it", "seconds to it"]
    text = f"""{START}
Written by `python -m analysis.price`, {time.strftime("%Y-%m-%d")}. {describe_machine()}; {jobs}
runs at a time, {threads_of_a_run(jobs)} of {os.cpu_count()} cores for each. Seeds
{", ".join(map(str, seeds))}: the mean (lowest to highest). pass@1 on 250 validation problems, 4
responses each, temperature 0.35, every second iteration (RestEM: each of its own, of 320 responses,
by the problems that choose its checkpoint), on a straight line between two. Schedules of 20
iterations where nothing else is said, the learning rate falling to 0 over them. Seconds and tokens
are of training, without evaluation, but for RestEM, whose walk needs its own.

{table(header, rows)}{END}
"""
    write_between(output, START, END, text)
    print(text)


if __name__ == "__main__":
    tyro.cli(main)
