"""Your own problems: a folder with <split>.jsonl, each line a problem."""

import os

from common import require
from tasks.jsonl import check_answer, read_jsonl

SPLITS = ("sft", "train", "validation", "test")  # sft.py learns from the first, others from train


def load_own(split: str, folder: str, grading_rule: str) -> list[tuple[str, str, str | None]]:
    """(prompt, answer, solution)s of a split. Raises UsageError where a problem stands in another
    file of the folder too, perhaps with other line ends or more spaces: what is trained on must not
    be evaluated on."""
    # One file serves sft.py and the RL scripts: sft.jsonl where there is one, else train.jsonl.
    has_sft_file = os.path.exists(os.path.join(folder, "sft.jsonl"))
    file = "train" if split == "sft" and not has_sft_file else split
    rows = read_jsonl(os.path.join(folder, f"{file}.jsonl"), ("prompt", "answer"))
    for row in rows:
        check_answer(grading_rule, row["answer"], row["where"])
    places = {tuple(row["prompt"].split()): row["where"] for row in rows}
    for other in sorted({*SPLITS} - ({"sft", "train"} if file in ("sft", "train") else {file})):
        path = os.path.join(folder, f"{other}.jsonl")
        for row in read_jsonl(path, ("prompt",)) if os.path.exists(path) else ():
            place = places.get(tuple(row["prompt"].split()))
            require(
                place is None,
                f"{place}: the problem {row['prompt']!r:.60} is that of {row['where']} too: take "
                "it out of one of them, or scores would be of problems that were trained on",
            )
    return [(row["prompt"], row["answer"], row.get("solution")) for row in rows]
