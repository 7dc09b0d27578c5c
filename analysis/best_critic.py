"""Does PPO's critic fail, or do its settings? It gets other learning rates, more epochs, and a
policy that stays as it is, so that it alone learns.

    python -m analysis.best_critic             after `make compare`, whose SFT checkpoint it takes

Every run is one of ppo.py with its defaults but for what the table names (more epochs are more for
the policy, too). analysis/values.py asks the critic of the last checkpoint. The best settings, by
the explained variance within problems, are chosen on seed 1; the table has the seeds behind it.
"""

import json
import os
import statistics

import tyro
from tqdm import tqdm

import ppo
from analysis import values
from analysis.compare import describe_machine, interval, run_all, table, train, write_block

RATES = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2)
EPOCHS = (2, 8)
FROZEN = 1e-12  # the policy's learning rate: too low to change a weight
KINDS = {  # name: (the policy's learning rate, iterations)
    "policy trained": (ppo.Args.learning_rate, 20),
    "policy as it is": (FROZEN, 20),
    "policy as it is, ten times the responses": (FROZEN, 200),
}


def run_of(kind: str, rate: float, epochs: int, seed: int) -> tuple:
    """As `analysis.compare.plan` takes it. (Of flags that are given twice the last counts.)"""
    policy_rate, iterations = KINDS[kind]
    flags = ["--critic-learning-rate", f"{rate:g}", "--update-epochs", str(epochs)]
    flags += ["--num-iterations", str(iterations), "--save-every", str(iterations)]
    return "ppo", policy_rate, seed, *flags, "--eval-every", "0"


def measure(paths: list[str], jobs: int, bar: tqdm) -> list[dict[str, float]]:
    """Of each run's last critic: the explained variance of its values, over all states and within
    problems, and what exact values would have within problems."""
    commands, found = {}, []
    for path in paths:
        command = ["-m", "analysis.values", "--run", path, "--num-actions", "0"]
        commands[f"{path}/values.log"] = [*command, "--num-states", "256"]
    run_all(commands, jobs, bar)
    for path in paths:
        (name,) = os.listdir(f"{path}/values")
        with open(f"{path}/values/{name}") as file:
            states = json.load(file)["states"]
        of = values.measure([s["truth"] for s in states], [s["ppo"] for s in states])
        within = values.within_problems(states, "ppo")
        ceiling = values.ceilings(states, values.Args.truth)[1]
        found.append({"overall": of["explained"], "within": within, "ceiling": ceiling})
    return found


def main(
    seeds: tuple[int, ...] = (2, 3, 4, 5, 6),
    folder: str = "runs/critic",
    output: str = "docs/results.md",
    jobs: int = min(2, os.cpu_count() or 1),
) -> None:
    os.makedirs(folder, exist_ok=True)
    bar = tqdm(unit="command", smoothing=0)

    def score(kind: str, settings: list[tuple[float, int]], seeds: tuple[int, ...]) -> list[list]:
        """For each of the settings what `measure` says of its seeds."""
        wanted = [run_of(kind, *setting, seed) for setting in settings for seed in seeds]
        runs = train(wanted, folder, jobs, bar)
        found = iter(measure([runs[key] for key in wanted], jobs, bar))
        return [[next(found) for _ in seeds] for _ in settings]

    default = ppo.Args.critic_learning_rate, ppo.Args.update_epochs
    rows, tuning = [], []
    for kind, (_, iterations) in KINDS.items():
        grid = [(rate, epochs) for epochs in EPOCHS for rate in RATES]
        tried = [of[0]["within"] for of in score(kind, grid, (1,))]
        for i, epochs in enumerate(EPOCHS):
            of_rate = [f"{x:.2f}" for x in tried[i * len(RATES) : (i + 1) * len(RATES)]]
            tuning.append([kind, str(epochs), *of_rate])
        best = grid[max(range(len(grid)), key=tried.__getitem__)]
        responses = iterations * ppo.Args.num_prompts * ppo.Args.group_size
        for setting in dict.fromkeys([default, best]):
            (of_seeds,) = score(kind, [setting], seeds)
            figures = [
                interval([of[name] for of in of_seeds], ".2f") for name in ("overall", "within")
            ]
            ceiling = statistics.mean(of["ceiling"] for of in of_seeds)
            cells = [kind, f"{responses:,}", f"{setting[0]:g}", str(setting[1]), *figures]
            rows.append([*cells, f"{ceiling:.2f}"])
    bar.close()
    header = ["", "responses", "critic's learning rate", "epochs", "explained variance"]
    text = f"""<!-- critic -->
Written by `python -m analysis.best_critic`. {describe_machine()}; seeds
{", ".join(map(str, seeds))}: mean ± half of a 95 % interval (Student's t), 256 states each; first
ppo.py's defaults, then the best of the grid below.

{table([*header, "within problems", "exact values within"], rows)}
Within problems, by the critic's learning rate, seed 1:

{table(["", "epochs", *(f"{rate:g}" for rate in RATES)], tuning)}<!-- end of critic -->
"""
    write_block(output, "critic", text)
    print(text)


if __name__ == "__main__":
    tyro.cli(main)
