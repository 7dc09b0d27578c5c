"""Does PPO's critic fail, or do its settings? It gets other learning rates, more epochs, and a
policy that stays as it is, so that it alone learns.

    python -m analysis.best_critic               docs/results.md; 100 minutes, resumable

Every run is one of ppo.py from its seed's SFT checkpoint, with its defaults but for what the
table names (more epochs are more for the policy, too). analysis/values.py asks the last checkpoint.
The best settings, by the explained variance within problems, are chosen on seed 1; the table shows
other seeds, which are asked about other states. (Ten times the responses are tried with the default
number of epochs only: eight would take hours more.)
"""

import json
import math
import os
import statistics
import time

import torch
import tyro
from tqdm import tqdm

import ppo
from analysis import values
from analysis.compare import describe_machine, interval, run_all, table, train, write_block
from common import require
from recipes.demo import make_launcher, make_sft

RATES = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2)
KINDS = {  # name: (the policy's learning rate, iterations, epochs to try)
    "policy trained": (ppo.Args.learning_rate, 20, (2, 8)),
    "policy fixed": (1e-12, 20, (2, 8)),  # in all steps of a run a weight moves by less than 1e-8
    "policy fixed, ten times the responses": (1e-12, 200, (2,)),
}
PROMPTS, STATES, TRUTH = 64, 256, 64  # TRUTH: rollouts from a state


def run_of(kind: str, rate: float, epochs: int, seed: int) -> tuple:
    """Method, learning rate, seed and flags, for `analysis.compare.plan`. (Of a flag that is given
    twice the last counts.)"""
    policy_rate, iterations, _ = KINDS[kind]
    flags = ["--critic-learning-rate", f"{rate:g}", "--update-epochs", str(epochs)]
    flags += ["--num-iterations", str(iterations), "--save-every", "20", "--eval-every", "0"]
    return "ppo", policy_rate, seed, *flags, "--keep-checkpoints", "1"


def measure(runs: dict[tuple, str], last: int, jobs: int, bar: tqdm) -> list[dict[str, float]]:
    """Of each run's critic after iteration `last`: the explained variance of its values over all
    states and within problems, and that of exact values within problems."""
    commands, found = {}, []
    for (_, _, seed, *_), path in runs.items():
        command = ["-m", "analysis.values", "--run", path, "--iterations", str(last)]
        command += ["--num-prompts", str(PROMPTS), "--num-states", str(STATES)]
        command += ["--truth", str(TRUTH), "--num-actions", "0", "--seed", str(seed)]
        commands[f"{path}/values.log"] = command
    run_all(commands, jobs, bar)
    for path in runs.values():
        with open(f"{path}/values/iteration_{last:06d}.json") as file:
            states = json.load(file)["states"]
        of = values.measure([s["truth"] for s in states], [s["ppo"] for s in states])
        within = values.within_problems(states, "ppo")
        ceiling = values.ceilings(states, TRUTH)[1]
        found.append({"overall": of["explained"], "within": within, "ceiling": ceiling})
    return found


def main(
    seeds: tuple[int, ...] = (2, 3, 4, 5, 6),
    folder: str = "runs/critic",
    output: str = "docs/results.md",
    jobs: int = torch.cuda.device_count() or min(2, os.cpu_count() or 1),
) -> None:
    require(seeds and 1 not in seeds, "--seeds: name some; on seed 1 the settings are chosen")
    os.makedirs(folder, exist_ok=True)
    make_sft(make_launcher(), 1, *seeds)
    bar = tqdm(unit="command", smoothing=0)

    def score(kind: str, settings: list[tuple[float, int]], seeds: tuple[int, ...]) -> list[dict]:
        """What `measure` says of each of the settings with each of the seeds."""
        wanted = [run_of(kind, *setting, seed) for setting in settings for seed in seeds]
        return measure(train(wanted, folder, jobs, bar), KINDS[kind][1], jobs, bar)

    default = ppo.Args.critic_learning_rate, ppo.Args.update_epochs
    rows, tuning = [], []
    for kind, (_, iterations, epochs_tried) in KINDS.items():
        grid = [(rate, epochs) for epochs in epochs_tried for rate in RATES]
        tried = [of["within"] for of in score(kind, grid, (1,))]
        for i, epochs in enumerate(epochs_tried):
            of_rate = [f"{x:.2f}" for x in tried[i * len(RATES) : (i + 1) * len(RATES)]]
            tuning.append([kind, str(epochs), *of_rate])
        tried = [-math.inf if math.isnan(x) else x for x in tried]  # of a policy that collapsed
        responses = iterations * ppo.Args.num_prompts * ppo.Args.group_size
        best = grid[tried.index(max(tried))]
        for setting in [best] if rows else dict.fromkeys([default, best]):
            of_seeds = score(kind, [setting], seeds)
            names = "overall", "within", "ceiling"
            figures = [interval([of[name] for of in of_seeds], ".2f") for name in names[:2]]
            ceiling = statistics.mean(of["ceiling"] for of in of_seeds)
            cells = [kind, f"{responses:,}", f"{setting[0]:g}", str(setting[1]), *figures]
            rows.append([*cells, f"{ceiling:.2f}"])
    bar.close()
    header = ["", "responses", "critic's learning rate", "epochs", "explained variance"]
    text = f"""<!-- critic -->
Written by `python -m analysis.best_critic`, {time.strftime("%Y-%m-%d")}, on {describe_machine()}.
Seeds {", ".join(map(str, seeds))}, ± as above;
{STATES} states ({PROMPTS} training problems) per run, truth: {TRUTH} rollouts
(the columns are explained [below](#the-papers-findings-beside-ours)).
First ppo.py's defaults, then the best of each grid. *Policy fixed*: only the critic learns.

{table([*header, "within problems", "that of exact values"], rows)}
The grids: within problems, by the critic's learning rate, seed 1.

{table(["", "epochs", *(f"{rate:g}" for rate in RATES)], tuning)}<!-- end of critic -->
"""
    write_block(output, "critic", text)
    print(text)


if __name__ == "__main__":
    tyro.cli(main)
