"""pass@1 of a checkpoint: the share of right responses, over problems and rounds.

    pass@1 = mean over problems of (right responses / rounds)
    Its 95 % interval is a bootstrap over problems: more problems narrow it, more rounds hardly do.

    python evaluate.py --model runs/vineppo-chain-seed1/hf
    torchrun --nproc-per-node 8 evaluate.py --model CHECKPOINT --task gsm8k --data-dir FOLDER

Left out on purpose: majority vote, pass@k, greedy decoding.
"""

# ==== 1. imports ==================================================================================
import json
import os
from dataclasses import asdict, dataclass
from typing import Literal

import torch

from common import data, engines, flags, ranks, sampling
from given import folder
from mathequal import worker


# ==== 2. arguments (model, task, engine: common/flags.py) =========================================
@dataclass
class Args(flags.Model, flags.Sampler):
    split: Literal["train", "validation", "test"] = "test"
    """which problems"""
    num_problems: int = 0
    """how many of the split, the first that fit; 0: all"""
    rounds: int = 16
    """responses per problem"""
    temperature: float = 0.35
    """logits are divided by this; higher: more varied responses"""
    top_p: float = 1.0
    """nucleus sampling: only the likeliest tokens of this total probability; 1: all tokens"""
    max_response_len: int = 80
    """most tokens of a response, the end token EOS included; one that is cut off counts as wrong"""
    gpu_memory_utilization: float = 0.8
    """share of a GPU's memory for vLLM; lower it when memory runs out"""
    output: str = ""
    """JSON file to write the result and each problem's score to"""


def bootstrap_interval(
    scores: list[float], seed: int, resamples: int = 10_000
) -> tuple[float, float]:
    """95 % interval of the mean over problems (percentiles of the means of resampled problems)."""
    generator = torch.Generator().manual_seed(seed)
    values, size = torch.tensor(scores), len(scores)
    picks = (torch.randint(size, (size,), generator=generator) for _ in range(resamples))
    means = torch.stack([values[pick].mean() for pick in picks])
    low, high = means.quantile(torch.tensor([0.025, 0.975])).tolist()
    return low, high


def main(args: Args) -> None:
    ranks.set_up()
    flags.check(args)
    if args.output and ranks.is_main():
        folder.check_output(args.output)
    rule, problems = data.find_task(args).grading_rule, data.load_split(args, args.split)
    tokenizer = engines.load_tokenizer(args)
    problems, prompts = data.fit(args, problems, tokenizer, args.num_problems or None)
    sampler = sampling.Sampler(args, tokenizer)
    scores = sampler.evaluate(
        problems, prompts, rule, args.seed, args.rounds, args.temperature, progress=True
    )
    low, high = bootstrap_interval(scores, args.seed)
    result = {"pass@1": sum(scores) / len(scores), "interval": [low, high], **asdict(args)}
    result["grading_failures"] = sum(ranks.gather([worker.take_failures()]))
    ranks.say(
        f"pass@1 ({args.split}, {len(problems)} problems, {args.rounds} rounds): "
        f"{result['pass@1']:.3f}, 95 % interval {low:.3f} to {high:.3f} "
        f"({result['grading_failures']} answers counted as wrong because grading failed)"
    )
    if args.output and ranks.is_main():
        with open(args.output + ".tmp", "w") as file:
            json.dump({**result, "scores": scores}, file)
        os.replace(args.output + ".tmp", args.output)


if __name__ == "__main__":
    main(flags.parse(Args))
