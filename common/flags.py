"""Flags that the scripts inherit, as no algorithm depends on them; and checks of all flags."""

import dataclasses
import math
import sys
from typing import Literal

import torch.distributed as dist
import tyro

from common import require


@dataclasses.dataclass
class Model:
    model: str = "runs/sft/hf"
    """the model to start from, or to evaluate: a folder, or a name on the Hugging Face hub"""
    trust_remote_code: bool = False
    """allow a model's own Python files and pickled weights (.bin), which can run any code"""
    chat: bool = False
    """for chat models: write each prompt as a user's message, by the model's chat template"""
    task: str = "chain"
    """the problems: chain (embedded, no download), gsm8k, math or jsonl (your own)"""
    data_dir: str = ""
    """folder with the problems, in JSONL files; empty: gsm8k and math come from the hub
    for --task jsonl also a folder of Parquet files, or a data set on the hub: hub:OWNER/NAME"""
    prompt_field: str = "prompt"
    """for --task jsonl: the field (column) with the problem"""
    answer_field: str = "answer"
    """the field with the right answer, or with a solution that has it after #### or in a box"""
    solution_field: str = "solution"
    """the field with the solution that sft.py learns to write"""
    grading_rule: Literal["auto", "####", "boxed"] = "auto"
    """for --task jsonl: the answer is the number after #### (auto) or the last LaTeX box"""
    step_rule: Literal["auto", "line", "gsm8k", "math"] = "auto"
    """for --task jsonl: a reasoning step ends with each line (auto) or each sentence (math)"""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """of the model (the optimizer has float32); auto: bfloat16 where a GPU has it, else float32"""
    max_model_len: int = 128
    """most tokens of prompt + response; prompts too long for it are dropped, and counted"""
    seed: int = 1
    """decides all that is drawn at random: prompts, samples, rollouts, minibatches"""


@dataclasses.dataclass
class Sampler:
    stop: str = ""
    """a text that ends a response, as EOS does; it is cut off, and no EOS takes its place"""
    tensor_parallel_size: int = 1
    """GPUs that hold one vLLM engine together; raise it for models too large for one GPU"""
    gpu_memory_utilization: float = 0.5
    """share of a GPU's memory that vLLM has while it samples; the update has all of it"""


@dataclasses.dataclass
class Run:
    output_dir: str = ""
    """the run's folder; empty: runs/<script>-<task>-seed<seed>"""
    resume: Literal["no", "auto"] = "no"
    """auto: continue the run in --output-dir from its newest checkpoint"""
    track: bool = False
    """log to Weights & Biases too (pip install wandb); TensorBoard files are always written"""
    zero_stage: Literal[0, 2, 3] = 0
    """DeepSpeed ZeRO saves memory: 2 splits optimizer and gradients over ranks, 3 weights too"""
    micro_batch_tokens: int = 4096
    """tokens of one forward pass on a rank, a micro-batch; fewer need less memory, same results"""
    gradient_checkpointing: bool = False
    """compute activations again in the backward pass: less memory, more time"""
    eval_every: int = 5
    """iterations between evaluations on validation problems; 0: never"""
    eval_problems: int = 100
    """validation problems that are evaluated, the first that fit"""
    save_every: int = 5
    """iterations between checkpoints; the last iteration always has one"""
    keep_checkpoints: int = 2
    """how many new ones stay; so do the weights of the best one on validation problems"""


@dataclasses.dataclass
class Training(Model, Sampler, Run):
    eval_rounds: int = 4
    """responses per validation problem"""
    eval_temperature: float = 0.35
    """sampling temperature of evaluations"""


# These may change when a run is resumed: results stay the same, except for rounding.
FREE = ("resume", "output_dir", "track", "save_every", "keep_checkpoints", "micro_batch_tokens")
FREE += ("gradient_checkpointing", "gpu_memory_utilization")

AT_LEAST_1 = ("num_prompts", "group_size", "minibatch_size", "num_iterations", "update_epochs")
AT_LEAST_1 += ("max_response_len", "k", "micro_batch_tokens", "eval_problems", "eval_rounds")
AT_LEAST_1 += ("save_every", "keep_checkpoints", "batch_size", "rounds", "max_pairs")
ABOVE_0 = ("learning_rate", "critic_learning_rate", "max_grad_norm", "clip_coef")
ABOVE_0 += ("clip_coef_value", "beta", "num_epochs")
FROM_0 = ("kl_coef", "penalty", "eval_every", "max_steps_valued", "num_problems")
UP_TO_1 = ("warmup_fraction", "gamma", "gae_lambda", "smoothing")
RANGES = (
    (AT_LEAST_1, lambda x: x >= 1, "at least 1"),
    (ABOVE_0, lambda x: 0 < x < math.inf, "above 0 and finite"),
    (FROM_0, lambda x: x >= 0, "0 or more"),
    (UP_TO_1, lambda x: 0 <= x <= 1, "between 0 and 1"),
    (("temperature", "eval_temperature"), lambda x: 0 < x <= 2, "above 0 and at most 2"),
    (("top_p", "gpu_memory_utilization"), lambda x: 0 < x <= 1, "above 0 and at most 1"),
    (("seed",), lambda x: 0 <= x < 2**63, "0 or more, and below 2**63"),
)


def check(args, num_responses: int = 0) -> None:
    """Raises UsageError for flags out of range, and where minibatches do not divide the responses
    of an iteration (`num_responses`; 0: they need not)."""
    for names, holds, allowed in RANGES:
        for name in (name for name in names if hasattr(args, name)):
            value = getattr(args, name)
            require(holds(value), f"--{name.replace('_', '-')} {value}: must be {allowed}")
    if hasattr(args, "max_response_len"):
        require(
            args.max_response_len < args.max_model_len,
            f"--max-response-len {args.max_response_len} leaves no room for a prompt: it must be "
            f"less than --max-model-len {args.max_model_len}",
        )
    if num_responses:
        require(
            num_responses % args.minibatch_size == 0,
            f"--minibatch-size {args.minibatch_size}: must divide the {num_responses} responses of "
            f"an iteration (--num-prompts {args.num_prompts} x --group-size {args.group_size})",
        )


def describe_batch(args) -> str:
    num_responses = args.num_prompts * args.group_size
    num_minibatches = num_responses // args.minibatch_size
    return (
        f"{args.num_prompts} prompts x {args.group_size} responses = {num_responses} episodes = "
        f"{num_minibatches} minibatches x {args.update_epochs} epochs = "
        f"{num_minibatches * args.update_epochs} optimizer steps an iteration, "
        f"on {dist.get_world_size()} ranks"
    )


def parse(script):
    """The command line as an object of `script`, a script's Args. --help shows a group of flags for
    each class that Args is made of: the script's own first, then those that it inherits."""
    parts, taken = {}, set()
    for owner in filter(dataclasses.is_dataclass, script.__mro__):
        # derived from the script, so that the help texts are found
        part = type(owner.__name__, (script,), {"__post_init__": lambda self: None})
        names = [name for name in owner.__annotations__ if name not in taken]
        part.__dataclass_fields__ = {name: script.__dataclass_fields__[name] for name in names}
        parts[owner.__name__.lower().replace("args", "script")] = part
        taken |= {*names}
    groups = [(name, tyro.conf.OmitArgPrefixes[part]) for name, part in parts.items()]
    description = sys.modules[script.__module__].__doc__
    parsed = tyro.cli(dataclasses.make_dataclass("Flags", groups), description=description)
    values = [(getattr(parsed, name), part.__dataclass_fields__) for name, part in parts.items()]
    return script(**{name: getattr(one, name) for one, names in values for name in names})
