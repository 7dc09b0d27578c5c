"""Is one checkpoint better than another on the same problems? Prints a table in Markdown.

    python -m analysis.paired before.json after.json other.json

The files are what `evaluate.py --output` writes; the first is what the others are compared with.
pass@1 and difference have 95 % intervals, by a bootstrap over problems. A difference is taken
problem by problem, so how hard the problems are cancels out: its interval is narrower than the two
of pass@1 suggest. It leaves out how training seeds differ.
"""

import json
import os
from typing import Annotated

import tyro

from analysis.compare import table
from common import require
from evaluate import bootstrap_interval

SAME = ("task", "data_dir", "prompt_field", "answer_field", "grading_rule", "chat", "split")
SAME += ("num_problems", "max_model_len", "max_response_len", "stop", "temperature", "top_p")


def show(scores: list[float], form: str = ".3f") -> str:
    low, high = bootstrap_interval(scores, seed=1)
    return f"{sum(scores) / len(scores):{form}} ({low:{form}} to {high:{form}})"


def main(files: Annotated[list[str], tyro.conf.Positional]) -> None:
    """Compares checkpoints on the same problems.

    Args:
        files: JSON files of evaluate.py; all are compared with the first
    """
    require(len(files) > 1, "name two files or more")
    found: list[dict] = []
    for name in files:
        require(os.path.exists(name), f"{name}: no such file; evaluate.py --output writes it")
        with open(name) as file:
            found.append(json.load(file))
        require("scores" in found[-1], f"{name} is not what evaluate.py --output writes")
        other = [key for key in SAME if found[-1].get(key) != found[0].get(key)]
        require(not other, f"{name} has another {', '.join(other)} than {files[0]}")
        sizes = len(found[-1]["scores"]), len(found[0]["scores"])
        require(sizes[0] == sizes[1], f"{name}: {sizes[0]} problems; {files[0]}: {sizes[1]}")
    rows = []
    for one in found:
        pairs = zip(one["scores"], found[0]["scores"], strict=True)
        difference = "" if one is found[0] else show([a - b for a, b in pairs], "+.3f")
        rows.append([one["model"], show(one["scores"]), difference])
    print(table(["checkpoint", "pass@1", f"minus {found[0]['model']}"], rows), end="")


if __name__ == "__main__":
    tyro.cli(main)
