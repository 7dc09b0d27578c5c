"""GSM8K and MATH: from the hub or from a folder, with the same splits."""

import functools
import hashlib
import json
import os
import re

from common import ranks, require
from mathequal.boxes import extract_boxed
from tasks.hub import read_hub
from tasks.jsonl import check_answer, check_row, read_jsonl

PROMPT = "[MATH_TASK] Problem:\n{problem}\n\nSolution:"  # as in the official configs
SUBJECTS = ("algebra", "counting_and_probability", "geometry", "intermediate_algebra")
SUBJECTS += ("number_theory", "prealgebra", "precalculus")
MATH = "EleutherAI/hendrycks_math"
HUB = {  # the (dataset, config, split)s that make up a file
    ("gsm8k", "train"): [("openai/gsm8k", "main", "train")],
    ("gsm8k", "test"): [("openai/gsm8k", "main", "test")],
    ("math", "train"): [(MATH, one, split) for one in SUBJECTS for split in ("train", "test")],
    ("math", "test"): [("HuggingFaceH4/MATH-500", "default", "test")],
}
FIELDS = {"gsm8k": ("question", "answer"), "math": ("problem", "solution")}


@functools.cache  # one file holds two splits
def load_mathematics(task: str, file: str, data_dir: str) -> tuple[dict[str, list[tuple]], int]:
    """{split: (prompt, answer, solution)s} of the file "train" or "test", and how many validation
    problems are missing.

    GSM8K: 7,100 / 373 / 1,319 problems; MATH: 11,498 / 500 / 500 (11,500 less two whose box is
    empty), sorted by fingerprint, so that the order does not depend on where rows come from.
    splits.json has the fingerprints of the validation problems (the smallest ones, since the
    paper's choice is not known) and of the test problems (for MATH, MATH-500).
    """
    where = os.path.join(data_dir, f"{file}.jsonl") if data_dir else f"{task} from the hub"
    rows = read_jsonl(where, FIELDS[task]) if data_dir else read_parts(task, file)
    with open(os.path.join(os.path.dirname(__file__), "splits.json")) as stream:
        known = json.load(stream)[task]
    for row in rows if task == "math" else ():
        if "answer" in row:  # some rows have it
            check_row(row, ("answer",), (), row["where"])
    found = sorted(
        (fingerprint(row[FIELDS[task][0]]), *parse(task, row), row["where"]) for row in rows
    )
    keys = {key for key, *_ in found}
    missing = {name: len({*known[name]} - keys) for name in known}
    if file == "test":
        strangers = len(keys - {*known["test"]})
        require(
            not missing["test"] and not strangers,
            f"{where}: not the test set of {task}: {missing['test']} of its {len(known['test'])} "
            f"problems are missing, {strangers} others are in it (use --task jsonl for your own)",
        )
    else:  # all test problems are in it, and taken out, or none
        require(
            missing["test"] in (0, len(known["test"])),
            f"{where}: only {len(known['test']) - missing['test']} of the {len(known['test'])} "
            "test problems are recognized in it: the others may be in it in other words, and would "
            "be trained on. Remove all test problems, or use the published file",
        )
    split_of = {key: name for name in known for key in known[name]}
    splits: dict[str, list[tuple]] = {"train": [], "validation": [], "test": []}
    for key, prompt, answer, solution, _ in found:
        if answer:
            splits[split_of.get(key, "train")].append((prompt, answer, solution))
    counts = [f"{len(problems)} {name}" for name, problems in splits.items() if problems]
    unusable = [place for _, _, answer, _, place in found if not answer]
    if unusable:
        counts.append(f"{len(unusable)} without an answer ({', '.join(unusable[:3])})")
    ranks.say(f"{where}, {len(rows)} rows: {', '.join(counts)}")
    return splits, missing["validation"]


def fingerprint(text: str) -> str:
    """16 hexadecimal digits, which do not depend on spaces and line ends."""
    return hashlib.sha256("".join(text.split()).encode()).hexdigest()[:16]


def parse(task: str, row: dict) -> tuple[str, str, str]:
    """(prompt, answer, solution) of a row. MATH's answer is in the last box that is not empty;
    without one the answer is "", and the row is unusable."""
    if task == "math":
        answer = row.get("answer") or extract_boxed(row["solution"]) or ""
        text, solution = row["problem"], row["solution"]
    else:
        # "48/2 = <<48/2=24>>24": models should not learn to write these calculator notes.
        text, solution = row["question"], re.sub(r"<<.*?>>", "", row["answer"], flags=re.DOTALL)
        _, marker, answer = solution.rpartition("####")
        require(marker, f"{row['where']}: the answer has no '####' before its number")
        check_answer("####", answer, row["where"])
        answer = answer.strip()
    return PROMPT.format(problem=text.strip()), answer, f"\n{solution}\n"


def read_parts(task: str, file: str) -> list[dict]:
    hint = "run this once where there is a network, or give a folder with train.jsonl and "
    options = FIELDS[task], (), f"--task {task}", f"{hint}test.jsonl (--data-dir)"
    parts = [read_hub(*part, *options) for part in HUB[task, file]]
    return [row for part in parts for row in part]
