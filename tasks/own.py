"""Your own problems: a folder with <split>.jsonl or <split>.parquet, or a data set on the hub."""

import functools
import os

from common import UsageError, require
from mathequal.boxes import extract_boxed
from tasks.hub import read_hub
from tasks.jsonl import check_answer, read_jsonl, read_parquet

SPLITS = ("sft", "train", "validation", "test")  # sft.py learns from "sft" if it is there
FIELDS = ("prompt", "answer", "solution")


def load_own(
    split: str, source: str, grading_rule: str, fields: tuple[str, str, str] = FIELDS
) -> list[tuple[str, str, str | None]]:
    """(prompt, answer, solution)s of a split; `fields`: their columns. Raises UsageError
    where a problem is in another split too, perhaps with other spaces and line ends: scores must
    not be of problems that were trained on."""
    prompt, answer, solution = fields
    # sft.py reads "sft" where there is one, else "train", as the RL scripts do.
    name = "train" if split == "sft" and not has_split(source, "sft") else split
    rows = read_split(source, name, (prompt, answer), (solution,))
    answers = find_answers(grading_rule, [row[answer] for row in rows])
    for row, one in zip(rows, answers, strict=True):
        what = f"{row['where']}: no box in {row[answer]!r:.60}, as other rows have: remove it"
        require(one, what)
        check_answer(grading_rule, one, row["where"])
    found = [(r[prompt], one, r.get(solution)) for r, one in zip(rows, answers, strict=True)]
    places = {tuple(row[prompt].split()): row["where"] for row in rows}
    for other in sorted({*SPLITS} - ({"sft", "train"} if name in ("sft", "train") else {name})):
        for row in read_split(source, other, (prompt,)) if has_split(source, other) else ():
            place = places.get(tuple(row[prompt].split()))
            require(
                place is None,
                f"{place}: the problem {row[prompt]!r:.60} is also in {row['where']}: remove it "
                "from one of them, else scores would be of problems that were trained on",
            )
    return found


def find_answers(rule: str, texts: list[str]) -> list[str]:
    """What is compared. Where a data set gives whole solutions as answers: what is after the last
    "####" or in the last box ("" without a box, if others have one). Else the texts."""
    if rule == "####":
        return [text.rpartition("####")[2].strip() or text for text in texts]
    boxes = [extract_boxed(text) or "" for text in texts]
    return boxes if any(boxes) else texts


def has_split(source: str, split: str) -> bool:
    if source.startswith("hub:"):
        return split in list_splits(source)
    return any(os.path.exists(os.path.join(source, f"{split}.{kind}")) for kind in KINDS)


KINDS = {"jsonl": read_jsonl, "parquet": read_parquet}


def read_split(
    source: str, split: str, fields: tuple[str, ...], others: tuple[str, ...] = ()
) -> list[dict]:
    if source.startswith("hub:"):
        known, skip = ", ".join(list_splits(source)), " (--eval-every 0 skips evaluation)"
        hint = skip if split == "validation" else ""
        what = f"--data-dir {source}"
        require(has_split(source, split), f"{what}: no split {split!r}; it has {known}{hint}")
        return read_hub(*find_name(source), split, fields, others, what, HINT)
    paths = {kind: os.path.join(source, f"{split}.{kind}") for kind in KINDS}
    kind = next((kind for kind, path in paths.items() if os.path.exists(path)), "jsonl")
    return KINDS[kind](paths[kind], fields, others)


HINT = "run this once with a network; write hub:OWNER/NAME or hub:OWNER/NAME/CONFIG"


def find_name(source: str) -> tuple[str, str | None]:
    """("owner/name", configuration or None) of "hub:owner/name/configuration"."""
    owner, _, rest = source.removeprefix("hub:").partition("/")
    name, _, config = rest.partition("/")
    return f"{owner}/{name}", config or None


@functools.cache
def list_splits(source: str) -> list[str]:
    from datasets import get_dataset_split_names

    name, config = find_name(source)
    try:
        return get_dataset_split_names(name, config)
    except Exception as error:  # of any kind, from the network or the hub
        reason = " ".join(str(error).split())[:200]
        raise UsageError(f"--data-dir {source}: not found ({reason}): {HINT}") from None
