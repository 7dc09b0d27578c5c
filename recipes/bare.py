"""The embedded task without filler words: writes demonstrations and an untrained model for sft.py.

    python -m recipes.bare runs/bare
    python sft.py --model runs/bare/new --task jsonl --data-dir runs/bare --output-dir runs/bare/sft

Without fillers, the responses to a prompt share most of their prefixes (docs/credit.md). Train the
checkpoint with --task chain, which has the same prompts and answers.
"""

import json
import os
import re
from typing import Annotated

import torch
import tyro

from common import data, require
from tasks import chain


def main(folder: Annotated[str, tyro.conf.Positional]) -> None:
    require(not os.path.exists(folder), f"{folder} exists already; name a new folder")
    from transformers import AutoModelForCausalLM

    os.makedirs(folder)
    for split in ("sft", "validation"):
        with open(f"{folder}/{split}.jsonl", "w") as file:
            for problem in data.load_problems("chain", split):
                line = problem._asdict()
                line["solution"] = re.sub("[a-z]+ | [a-z]+", "", problem.solution)
                file.write(json.dumps(line) + "\n")
    tokenizer = chain.make_tokenizer()
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(chain.make_model_config(tokenizer))
    for part in (model, tokenizer):
        part.save_pretrained(f"{folder}/new")


if __name__ == "__main__":
    tyro.cli(main)
