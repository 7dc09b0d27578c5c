"""How many reasoning steps the solutions of GSM8K and MATH have, as a PNG.

python -m analysis.step_counts --gsm8k FOLDER --math FOLDER --output steps.png

Without a folder the problems come from the hub.
"""

from collections import Counter

import matplotlib
import tyro

from common.data import TASKS, load_problems
from common.steps import RULES

matplotlib.use("Agg")
from matplotlib import pyplot as plt

COLORS = {"gsm8k": "#0072b2", "math": "#d55e00"}


def main(gsm8k: str = "", math: str = "", output: str = "steps.png") -> None:
    figure, axes = plt.subplots(figsize=(7, 3), layout="constrained")
    for task, folder in (("gsm8k", gsm8k), ("math", math)):
        problems = [
            p for name in ("train", "validation") for p in load_problems(task, name, folder)
        ]
        rule = RULES[TASKS[task].step_rule]
        counts = Counter(len(rule(problem.solution)) for problem in problems)
        mean = sum(n * times for n, times in counts.items()) / len(problems)
        said = (
            f"{task}: {len(problems)} solutions, {mean:.1f} steps on average, at most {max(counts)}"
        )
        print(said)
        shares = [100 * counts[n] / len(problems) for n in range(1, 41)]
        axes.step(range(1, 41), shares, where="mid", color=COLORS[task], label=said)
    axes.set(xlabel="reasoning steps (longer solutions not shown)", ylabel="% of the solutions")
    axes.set(xlim=(0, 40), ylim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(output, dpi=150)
    print(output)


if __name__ == "__main__":
    tyro.cli(main)
