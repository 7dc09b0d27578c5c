"""pass@1 of a checkpoint: the share of right responses, over problems and rounds.

    pass@1 = mean over problems of (right responses / rounds); the interval is a bootstrap over
    problems, which are the sample: more rounds do not make it much narrower, more problems do

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
import torch.distributed as dist
import tyro

from common import data, grading, run, sampling


# ==== 2. arguments ================================================================================
@dataclass
class Args:
    model: str
    """a checkpoint folder that transformers can load, or a name on the hub"""
    trust_remote_code: bool = False
    """run code that comes with the model: Python files, weights that are pickles (.bin)"""
    task: str = "chain"
    """chain (embedded), gsm8k, math or jsonl (your own)"""
    data_dir: str = ""
    """folder of JSONL files; without one gsm8k and math come from the hub"""
    split: Literal["train", "validation", "test"] = "test"
    num_problems: int = 0
    """the first ones of the split; 0: all"""
    rounds: int = 16
    """responses per problem"""
    temperature: float = 0.35
    top_p: float = 1.0
    max_response_len: int = 80
    """tokens, EOS included"""
    max_model_len: int = 128
    """tokens of prompt + response; prompts that leave no room are dropped and counted"""
    stop: str = ""
    """a string that ends a response"""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """auto: bfloat16 on a GPU, float32 on a CPU"""
    gpu_memory_utilization: float = 0.8
    """share of a GPU's memory for vLLM"""
    seed: int = 1
    output: str = ""
    """a JSON file for the result and the score of each problem"""


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
    rank, _ = run.set_up_processes()
    run.check_at_least_1(args, "rounds", "max_response_len")
    run.check_sampling(args, "temperature")
    problems = data.load_problems(args.task, args.split, args.data_dir)
    run.check_model(args.model, args.max_model_len, args.trust_remote_code)
    from transformers import AutoTokenizer

    problems = problems[: args.num_problems or len(problems)]
    num_loaded = len(problems)
    problems, prompts = data.encode_prompts(
        problems,
        AutoTokenizer.from_pretrained(args.model, trust_remote_code=args.trust_remote_code),
        args.max_model_len - args.max_response_len,
    )
    on_gpu = torch.cuda.is_available()
    dtype = run.resolve_dtype(args.dtype)
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo")
    sampler = sampling.Sampler(
        args.model,
        dtype,
        args.max_model_len,
        args.gpu_memory_utilization,
        trust_remote_code=args.trust_remote_code,
    )

    scores = sampling.evaluate(
        sampler,
        prompts,
        [problem.answer for problem in problems],
        rule=data.TASKS[args.task].grading_rule,
        rounds=args.rounds,
        temperature=args.temperature,
        top_p=args.top_p,
        max_tokens=args.max_response_len,
        seed=args.seed,
        stop=args.stop,
        progress=True,
    )
    low, high = bootstrap_interval(scores, args.seed)
    result = {"pass@1": sum(scores) / len(scores), "interval": [low, high], **asdict(args)}
    result["grading_failures"] = sum(run.gather([grading.worker.take_failures()]))
    if rank == 0:
        print(
            f"pass@1 ({args.split}, {len(problems)} problems, {args.rounds} rounds): "
            f"{result['pass@1']:.3f}, 95 % interval {low:.3f} to {high:.3f} "
            f"({num_loaded - len(problems)} problems dropped for their prompt's length, "
            f"{result['grading_failures']} answers counted as wrong because grading failed)"
        )
        if args.output:
            os.makedirs(os.path.dirname(os.path.abspath(args.output)), exist_ok=True)
            with open(args.output + ".tmp", "w") as file:
                json.dump({**result, "scores": scores}, file)
            os.replace(args.output + ".tmp", args.output)


if __name__ == "__main__":
    main(tyro.cli(Args))
