"""Keeps the training problems that a checkpoint gets right sometimes: neither never nor always.

    python evaluate.py --model SFT --split train --temperature 1 --rounds 4 --output rates.json
    python -m recipes.sometimes rates.json runs/sometimes
    python vineppo.py --model SFT --data-dir runs/sometimes

(the first with --task and --data-dir, the last with --task, both with the same limits of length).

Where all responses to a prompt have the same reward, GRPO and RLOO learn nothing from them. So from
a checkpoint that is seldom right they waste most of their samples. Validation and test problems
stay as they are.
"""

import dataclasses
import json
import os
import shutil
from typing import Annotated

import tyro

import evaluate
from common import data, engines, require
from tasks.mathematics import FIELDS, PROMPT


def main(
    rates: Annotated[str, tyro.conf.Positional], output: Annotated[str, tyro.conf.Positional]
) -> None:
    """Writes a folder for --data-dir.

    Args:
        rates: what evaluate.py --split train --output wrote, for GSM8K or MATH from a folder
        output: the new folder
    """
    require(os.path.exists(rates), f"{rates}: no such file; evaluate.py --output writes it")
    with open(rates) as file:
        found = json.load(file)
    known = found.get("split") == "train" and found["task"] in FIELDS and found["data_dir"]
    require(known, f"{rates}: not of --split train and GSM8K or MATH from a folder (--data-dir)")
    require(not os.path.exists(output), f"{output} exists already: remove it or name another")
    for name in ("train", "test"):
        file = f"{found['data_dir']}/{name}.jsonl"
        require(os.path.exists(file), f"{file}: no such file")
    names = [field.name for field in dataclasses.fields(evaluate.Args)]
    args = evaluate.Args(**{name: found[name] for name in names})
    every = data.load_split(args, "train")
    tried, _ = data.fit(args, every, engines.load_tokenizer(args), args.num_problems or None)
    same = len(tried) == len(found["scores"])
    require(same, f"{rates} is of other problems than {args.data_dir}: run evaluate.py again")
    pairs = zip(tried, found["scores"], strict=True)
    kept = {problem.prompt for problem, score in pairs if 0 < score < 1}
    dropped = {problem.prompt for problem in every} - kept
    os.makedirs(f"{output}.tmp", exist_ok=True)
    field = FIELDS[args.task][0]
    with (
        open(f"{args.data_dir}/train.jsonl", encoding="utf-8-sig", newline="\n") as source,
        open(f"{output}.tmp/train.jsonl", "w", encoding="utf-8", newline="\n") as target,
    ):
        for line in filter(str.strip, source):
            if PROMPT.format(problem=json.loads(line)[field].strip()) not in dropped:
                target.write(line)
    shutil.copy(f"{args.data_dir}/test.jsonl", f"{output}.tmp")
    os.rename(f"{output}.tmp", output)
    print(f"{output}: {len(kept)} of {len(tried)} problems are right sometimes")


if __name__ == "__main__":
    tyro.cli(main)
