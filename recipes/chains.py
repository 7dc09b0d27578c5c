"""Kin of the embedded task, for sft.py and the others: writes problems and an untrained model.

    python -m recipes.chains runs/long --operations 16 --slip .25
    python sft.py --model runs/long/new --task jsonl --data-dir runs/long --output-dir runs/long/sft

With the defaults the problems are those of --task chain. Long chains are hard to copy: start from
the checkpoint of chains half as long (analysis/when.py).
"""

import json
import os
import shutil
from typing import Annotated

import tyro

from common import data, require
from tasks import chain


def main(
    folder: Annotated[str, tyro.conf.Positional],
    operations: int = 8,
    weak: float = 0.5,
    slip: float = 0.5,
    words: int = 1,
    lost: tyro.conf.FlagConversionOff[bool] = False,
    seed: int = 1,
) -> None:
    """operations: of a problem. weak: share of facts that demonstrators get wrong, each with
    probability slip. words: fillers on each side of an equation. lost: a wrong result is `?`, and
    so are all after it. seed: of the model's weights."""
    require(not os.path.exists(folder), f"{folder} exists already; name a new folder")
    require(operations >= 4, f"--operations {operations}: must be at least 4, or problems run out")
    unfinished = f"{folder}.tmp"
    shutil.rmtree(unfinished, ignore_errors=True)
    os.makedirs(unfinished)
    for split, rows in chain.make_splits(operations, weak, slip, words, lost).items():
        with open(f"{unfinished}/{split}.jsonl", "w") as file:
            file.writelines(json.dumps(data.Problem(*row)._asdict()) + "\n" for row in rows)
    tokenizer = chain.make_tokenizer()
    tokenizer.model_max_length = 512
    for part in (chain.make_model(tokenizer, seed), tokenizer):
        part.save_pretrained(f"{unfinished}/new")
    os.rename(unfinished, folder)


if __name__ == "__main__":
    tyro.cli(main)
