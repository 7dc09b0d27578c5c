r"""Plans a run from its model's config alone: memory by part and phase, tokens, hours.

    python -m benchmarks.plan recipes/rho1b_math.sh vineppo
    python -m benchmarks.plan recipes/deepseekmath7b_math.sh ppo "--flags=--micro-batch-tokens 2500"
    python -m benchmarks.plan vineppo.py --model benchmarks/models/rho1b --ranks 1

The arithmetic is for one GPU per rank, in GiB. Activations have no formula: the scripts' own
log-probs run forward and backward on tensors without data, while the live bytes are counted. What
DeepSpeed keeps is taken from its source (0.19.8). `python -m benchmarks.plan_check` compares the
plan with real updates.
"""

import functools
import importlib
import itertools
import math
import os
import shlex
import subprocess
import weakref
from dataclasses import dataclass
from typing import NamedTuple
from unittest import mock

import torch
import tyro
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from common import flags, require
from common.checkpoints import BEST, BYTES
from common.engines import CHUNK, checkpoint_activations

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
METHODS = ("vineppo", "ppo", "grpo", "rloo")
GIB = 2**30
SIZE = {"bfloat16": 2, "float32": 4}
BUCKET = 500_000_000  # elements: DeepSpeed's default for ZeRO's bucket and for an all-reduce
# tokens of a prompt and of a response, steps of a response: MATH's and GSM8K's reference solutions
# (docs/real_data.md; at about 2.7 characters a token), and what the embedded task has
TYPICAL = {"math": (85, 200, 9.8), "gsm8k": (75, 100, 3.6), "chain": (20, 68, 9.0)}


@dataclass
class Args:
    run: tyro.conf.Positional[str]
    """a recipe, or a script with its defaults: vineppo.py, ppo.py, grpo.py, rloo.py"""
    method: tyro.conf.Positional[str] = ""
    """of a recipe, which of its methods: vineppo, ppo, grpo or rloo"""
    flags: str = ""
    """flags for the script, after those of the recipe: "--flags=--zero-stage 2 --k 3" """
    model: str = ""
    """folder with a config.json, or a name on the hub; empty: the recipe's in benchmarks/models, or
    the script's --model"""
    ranks: int = 0
    """GPUs; 0: as in the recipe, or 1 for a script"""
    gpu_memory: float = 80
    """memory of a GPU, in GiB"""
    overhead: float = 4
    """GiB that CUDA, NCCL, vLLM's graphs and fragmentation take of a GPU: an assumption"""
    sampler_overhead: float = 2
    """GiB of vLLM's share that are neither weights nor cache: an assumption"""
    prompt_len: float = 0
    """mean tokens of a prompt; 0 here and in the next two: typical for the task"""
    response_len: float = 0
    """mean tokens of a response"""
    steps: float = 0
    """mean steps of a response"""
    sample_rate: float = 3750
    """tokens that vLLM samples per second and GPU (the paper: 30,000 on 8 H100, 7B)"""
    tflops: float = 120
    """useful TFLOPS of a GPU in training: an assumption, 40 % of what an A100 has"""


class Setting(NamedTuple):
    """All that memory depends on."""

    model: str
    dtype: str
    zero_stage: int
    ranks: int
    micro_batch_tokens: int
    max_model_len: int
    max_response_len: int
    sampler_share: float  # --gpu-memory-utilization
    critic: bool
    device: str = "cuda"  # a CPU's AdamW goes through the tensors one by one
    gradient_checkpointing: bool = False
    tensor_parallel_size: int = 1


# ---- what is asked for ---------------------------------------------------------------------------


def read_run(args: Args) -> tuple[Setting, object]:
    """The setting, and the script's parsed flags."""
    words, module = shlex.split(args.flags), ""
    is_script, ranks = args.run.endswith(".py"), args.ranks
    method = os.path.basename(args.run)[:-3] if is_script else args.method
    require(not (is_script and args.method), f"{args.method}: leave this out with {args.run}")
    require(method in METHODS, f"{method!r}: plans are made for {', '.join(METHODS)} only")
    if not is_script:  # bash calls our function instead of the program
        require(os.path.isfile(args.run), f"{args.run}: no such recipe")
        torchrun = {"BASH_FUNC_torchrun%%": '() { printf "%s\\0" "$@"; }'}
        call = ["bash", os.path.abspath(args.run), method, *words]
        environment = {**os.environ, **torchrun, "LAUNCH": ""}  # --ranks says how many
        done = subprocess.run(call, cwd=ROOT, env=environment, capture_output=True, text=True)
        require(done.returncode == 0, f"{args.run}: {done.stderr.strip()}")
        words = done.stdout.split("\0")[:-1]
        ranks = ranks or int(words[words.index("--nproc-per-node") + 1])
        place = words.index("-m") + 1 if "-m" in words else words.index(f"{method}.py")
        module, words = words[place].removesuffix(".py"), words[place + 1 :]
    script = tyro.cli(importlib.import_module(module or method).Args, args=words)
    flags.check(script, script.num_prompts * script.group_size)
    named = os.path.join(ROOT, "benchmarks/models", os.path.basename(args.run).split("_")[0])
    model = args.model or (named if os.path.isdir(named) else script.model)
    require(
        os.path.isfile(f"{model}/config.json") or (model.count("/") == 1 and model[:5] != "runs/"),
        f"--model {model}: no config.json there; name a folder that has one, or a model on the hub",
    )
    require(ranks >= 0, f"--ranks {ranks}: must be 0 or more")
    require(script.zero_stage < 3, "--zero-stage 3: this plans only stages 0 and 2")
    sharded = script.tensor_parallel_size
    require(
        (ranks or 1) % sharded == 0,
        f"--tensor-parallel-size {sharded}: must divide the {ranks or 1} ranks",
    )
    dtype = "bfloat16" if script.dtype == "auto" else script.dtype
    lengths = script.micro_batch_tokens, script.max_model_len, script.max_response_len
    share = script.gpu_memory_utilization
    setting = Setting(
        model,
        dtype,
        script.zero_stage,
        ranks or 1,
        *lengths,
        share,
        critic=method == "ppo",
        gradient_checkpointing=script.gradient_checkpointing,
        tensor_parallel_size=sharded,
    )
    return setting, script


# ---- activations: the scripts' own code on tensors without data ----------------------------------


class Live(TorchDispatchMode):
    """Counts the bytes of tensors that are alive, and their peak."""

    def __init__(self):
        super().__init__()
        self.now, self.peak, self.seen = 0, 0, set()

    def add(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata not in self.seen:
            self.seen.add(storage._cdata)
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self.remove, storage._cdata, storage.nbytes())

    def remove(self, key: int, size: int) -> None:
        self.seen.discard(key)
        self.now -= size

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        output = function(*args, **(kwargs or {}))
        tree_map_only(torch.Tensor, self.add, output)
        return output


def make_model(model: str, dtype: str, critic: bool) -> torch.nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM  # seconds

    config = AutoConfig.from_pretrained(model)
    made = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype)).eval()
    if critic:  # as ppo.py's section 5b
        hidden = made.get_output_embeddings().in_features
        made.set_output_embeddings(torch.nn.Linear(hidden, 1, dtype=made.dtype))
    return made


@functools.lru_cache
def count(model: str, critic: bool = False) -> list[int]:
    """Number of elements of each parameter, in the model's order, tied ones once."""
    with FakeTensorMode():
        return [p.numel() for p in make_model(model, "float32", critic).parameters()]


@functools.lru_cache
def trace(s: Setting, critic: bool) -> dict[str, int]:
    """Bytes of a micro-batch: `pass`, the peak without gradients; `kept` for the backward pass;
    `peak` of a forward and a backward pass with what DeepSpeed's hooks hold; without weights and
    gradients. The largest micro-batch that the flags allow."""
    from ppo import compute_values  # seconds, too
    from vineppo import compute_logprobs

    rows = max(1, math.ceil(s.micro_batch_tokens / s.max_model_len))
    length = max(s.max_model_len, s.micro_batch_tokens) // rows
    num_new = min(s.max_response_len, length - 1)
    share, held = max(shares(count(s.model, critic), s.ranks)), {}

    def nonzero(self, as_tuple):  # for a mask of ones, as it has no data to look at
        index = torch.arange(rows * num_new)
        return index // num_new, index % num_new

    def reduce() -> None:
        if s.ranks > 1:  # the bucket's slices are made one tensor
            torch.empty(held["elements"], dtype=dtype)
        if "gradients" not in held:
            held["gradients"] = torch.empty(share, dtype=dtype)
        held["elements"] = 0

    def zero_2_hook(parameter) -> None:  # gradients move to a bucket, what is ours is kept
        if "bucket" not in held:
            held.update(bucket=torch.empty(BUCKET, dtype=dtype), elements=0)
        if held["elements"] + parameter.numel() > BUCKET:
            reduce()
        held["elements"] += parameter.numel()
        parameter.grad = None

    live = Live()
    with FakeTensorMode(), mock.patch.object(torch.Tensor, "nonzero", nonzero):
        model = make_model(s.model, s.dtype, critic)
        if s.gradient_checkpointing:
            checkpoint_activations(model)
        dtype = model.dtype
        inputs = torch.zeros(rows, length, dtype=torch.long), torch.full((rows,), length - num_new)
        mask = torch.ones(rows, num_new)
        forward = compute_values if critic else functools.partial(compute_logprobs, temperature=0.6)
        for parameter in model.parameters():
            live.add(parameter)
            if s.zero_stage == 2:
                parameter.register_post_accumulate_grad_hook(zero_2_hook)
            else:
                parameter.grad = torch.empty_like(parameter)
                live.add(parameter.grad)
        start = live.peak
        with live:
            with torch.no_grad():
                forward(model, *inputs, mask)
            without = live.peak - start
            output = forward(model, *inputs, mask)
            kept = live.now - start
            output.sum().backward()
            if s.zero_stage == 2:
                reduce()
    return {"pass": without, "kept": kept, "peak": live.peak - start}


# ---- what DeepSpeed keeps ------------------------------------------------------------------------


def shares(numels: list[int], ranks: int) -> list[int]:
    """Elements of the parameters that lie in each rank's part of ZeRO 2's flat buffer, whole."""
    size = 2 * math.ceil(sum(numels) / (2 * ranks))
    found, end = [0] * ranks, 0
    for numel in numels:
        for rank in range(end // size, (end + numel - 1) // size + 1):
            found[rank] += numel
        end += numel
    return found


def engine(s: Setting, critic: bool) -> dict[str, int]:
    """Bytes a rank. The first three are there all the time, `gradients` during the backward passes
    of an update, `step` at the end of one (stage_1_and_2.py; for ZeRO 0 in bfloat16
    unfused_optimizer.py, which shards nothing; in float32 PyTorch's AdamW)."""
    numels, size, half = count(s.model, critic), SIZE[s.dtype], s.dtype == "bfloat16"
    total, largest, cuda = sum(numels), max(numels), s.device == "cuda"
    if s.zero_stage == 2:
        own = 2 * math.ceil(total / (2 * s.ranks))
        gradients = size * max(shares(numels, s.ranks))
        adam = 4 * own if cuda else 8 * own  # square roots of the second moments
        flat = gradients + size * own + (4 * own if half else 0)
        step = max(gradients + 8 * largest, flat, 4 * own + adam)  # norms are float64
        parts = {"weights": size * own * s.ranks, "float32 weights": 4 * own, "Adam state": 8 * own}
    else:
        gradients = size * total
        adam = 4 * total if cuda else 8 * largest
        all_reduce = size * min(total, BUCKET + largest)
        step = gradients + max(all_reduce, 4 * total + adam if half else adam)
        parts = {
            "weights": size * total,
            "float32 weights": 4 * total * half,
            "Adam state": 8 * total,
        }
    return {**parts, "gradients": gradients, "step": step}


def plan_memory(s: Setting, gpu_memory: float) -> dict[str, dict[str, float]]:
    """GiB of a rank: phase -> part -> size."""
    size, critics = SIZE[s.dtype], [False, True][: 1 + s.critic]
    engines = [engine(s, critic) for critic in critics]
    passes = [trace(s._replace(sampler_share=0), critic) for critic in critics]
    reference = {"reference weights": size * sum(count(s.model))}
    always = dict(reference if s.device == "cpu" else {})  # a GPU has it for its passes only
    for name, parts in zip(("policy", "critic"), engines, strict=False):
        for part in ("weights", "float32 weights", "Adam state"):
            always[f"{name} {part}"] = parts[part]
    # weight_distance: float32 copies of a chunk of both models (where they are not there yet), and
    # their difference
    distance = 8 if (s.dtype, s.device) == ("float32", "cpu") else 12
    distance *= min(CHUNK, max(count(s.model)))
    worst = max(zip(engines, passes, strict=True), key=lambda x: x[0]["gradients"] + x[1]["peak"])
    weights = size * sum(count(s.model)) / s.tensor_parallel_size
    sampler = {
        "vLLM weights": weights,
        "vLLM cache and rest": s.sampler_share * gpu_memory * GIB - weights,
    }
    # DeepSpeed makes the state of ZeRO 0 in bfloat16 by a first step, while vLLM is awake. (ZeRO 2
    # flattens the weights then, which takes them twice; through the CPU where there is no room.)
    first = max(e["step"] for e in engines) if (size, s.zero_stage) == (2, 0) else 0
    phases = {
        "start": {**always, **sampler, "gradients and their copies": first},
        "sampling": {**always, **sampler, "log-probs": max(distance, *(p["pass"] for p in passes))},
        "reference": {**always, **reference, "log-probs": passes[0]["pass"]},
        "backward": {
            **always,
            "gradients": worst[0]["gradients"],
            "activations kept": worst[1]["kept"],
            "head logits and other passing": worst[1]["peak"] - worst[1]["kept"],
        },
        "step": {**always, "gradients and their copies": max(e["step"] for e in engines)},
    }
    return {n: {part: x / GIB for part, x in parts.items()} for n, parts in phases.items()}


def cache_tokens(s: Setting, args: Args) -> int:
    """Tokens whose keys and values fit into vLLM's share next to the weights."""
    from transformers import AutoConfig

    c = AutoConfig.from_pretrained(s.model)
    heads = getattr(c, "num_key_value_heads", None) or c.num_attention_heads
    width = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    room = (s.sampler_share * args.gpu_memory - args.sampler_overhead) * GIB
    # of a rank: its part of the weights and of the heads, of which it has one at least
    heads = max(1, heads // s.tensor_parallel_size)
    weights = SIZE[s.dtype] * sum(count(s.model)) / s.tensor_parallel_size
    return int((room - weights) / (2 * SIZE[s.dtype] * c.num_hidden_layers * heads * width))


def needed(s: Setting, args: Args) -> float:
    """GiB of the largest phase with everything; infinite where vLLM could not hold a sequence."""
    if cache_tokens(s, args) < s.max_model_len:
        return math.inf
    return args.overhead + max(sum(x.values()) for x in plan_memory(s, args.gpu_memory).values())


def advise(s: Setting, args: Args) -> list[str]:
    """Flags that make it fit, each with the new figure: alone, or where only ranks do, together."""

    def first(settings):
        return next((t for t in settings if needed(t, args) <= args.gpu_memory), None)

    smaller = [s.micro_batch_tokens // 2**i for i in range(1, 8)]
    smaller = [*(t for t in smaller if t > s.max_model_len), s.max_model_len]  # a row stays whole
    tokens = [t for t in smaller if t < s.micro_batch_tokens]
    sizes = sorted((x / 100 for x in range(5, 100, 5)), key=lambda x: abs(x - s.sampler_share))
    ranks = [s.ranks * 2**i for i in range(5)]
    found = [
        first(s._replace(micro_batch_tokens=x) for x in tokens),
        first([s._replace(zero_stage=2)]),
        first([s._replace(gradient_checkpointing=True)]),
        first(s._replace(sampler_share=x) for x in sizes),
        first(s._replace(ranks=x) for x in ranks),
    ]
    if not any(found[:4]):
        least = s._replace(micro_batch_tokens=min([s.micro_batch_tokens, *tokens]), zero_stage=2)
        again = [least, least._replace(gradient_checkpointing=True)]
        choices = itertools.product(ranks, again, sizes)
        found.append(first(one._replace(ranks=r, sampler_share=x) for r, one, x in choices))
    flags = {"sampler_share": "gpu-memory-utilization", "ranks": "nproc-per-node"}
    lines = []
    for t in filter(None, found):
        changed = [name for name in s._fields if getattr(s, name) != getattr(t, name)]
        words = [f"--{flags.get(n, n.replace('_', '-'))} {getattr(t, n)}" for n in changed]
        words = [word.removesuffix(" True") for word in words]
        lines.append(f"  fits with {' '.join(words)}: {needed(t, args):.1f} GiB")
    return lines


# ---- tokens and hours ----------------------------------------------------------------------------


def plan_tokens(script, prompt_len: float, response_len: float, steps: float) -> dict[str, float]:
    """Tokens of an iteration: sampled, sampled as rollouts, of one pass over the responses."""
    num_responses, rollouts = script.num_prompts * script.group_size, 0.0
    if hasattr(script, "k"):
        cap = min(steps, getattr(script, "max_steps_valued", 0) or steps)
        # a prompt has all of a response before it, the state behind step i of S (S - i) / S of it
        left = (cap - 1) * (1 - cap / (2 * steps))
        prompts = script.num_prompts if getattr(script, "share_rollouts", True) else num_responses
        rollouts = script.k * response_len * (prompts + num_responses * left)
    one_pass = num_responses * (prompt_len + response_len)
    return {"sample": num_responses * response_len, "rollouts": rollouts, "pass": one_pass}


def main(args: Args) -> None:
    s, script = read_run(args)
    total, memory = sum(count(s.model)), plan_memory(s, args.gpu_memory)
    name = os.path.basename(s.model.rstrip("/"))
    print(f"{name}: {total:,} parameters, {s.dtype}, ZeRO {s.zero_stage}, {s.ranks} ranks")
    print(f"\n{'GiB a rank':30}" + "".join(f"{name:>10}" for name in memory))
    for part in dict.fromkeys(part for parts in memory.values() for part in parts):
        row = "".join(f"{parts.get(part, 0):10.1f}" for parts in memory.values())
        print(f"{part:30}{row}")
    sums = [sum(parts.values()) for parts in memory.values()]
    print(f"{'sum':30}" + "".join(f"{x:10.1f}" for x in sums))
    cache, whole = cache_tokens(s, args), max(sums) + args.overhead
    print(f"vLLM's cache: {max(0, cache):,} tokens, {cache / s.max_model_len:.1f} of the longest")
    fits = needed(s, args) <= args.gpu_memory
    verdict = "fits" if fits else "does not fit"
    print(f"{whole:.1f} GiB with --overhead: {verdict} a GPU of {args.gpu_memory:g} GiB")
    if not fits:
        print("\n".join(advise(s, args)) or "  nothing that was tried fits")
    checkpoint = BYTES * (total + s.critic * sum(count(s.model, s.critic))) / 1e9
    disk = checkpoint * (script.keep_checkpoints + 1 + BEST)
    kept = f"--keep-checkpoints {script.keep_checkpoints}"
    print(
        f"a checkpoint has {checkpoint:.0f} GB; {kept} of them, one being written, and the best "
        f"one's weights: {disk:.0f} GB of disk"
    )

    typical = TYPICAL.get(script.task, (0, 0, 0))
    given = args.prompt_len, args.response_len, args.steps
    prompt_len, response_len, steps = (g or t for g, t in zip(given, typical, strict=True))
    require(
        min(prompt_len, response_len, steps) > 0,
        f"--task {script.task} has no typical lengths: give --prompt-len, --response-len, --steps",
    )
    tokens = plan_tokens(script, prompt_len, response_len, steps)
    # FLOPs of a token: 2 a parameter forward, 4 backward; two passes before the update
    trained = script.update_epochs * tokens["pass"]
    of_update = (8 if s.gradient_checkpointing else 6) * trained
    flops = (of_update + 2 * 2 * tokens["pass"]) * total
    if s.critic:
        flops += (of_update + 2 * tokens["pass"]) * total
    sampling = (tokens["sample"] + tokens["rollouts"]) / (args.sample_rate * s.ranks)
    update = flops / (args.tflops * 1e12 * s.ranks)
    minibatches = script.num_prompts * script.group_size // script.minibatch_size
    # an all-reduce of the gradients sends them twice; ZeRO 2 then gathers the weights
    sent = (3 if s.zero_stage == 2 else 2) * SIZE[s.dtype] * total * (s.ranks - 1) / s.ranks / GIB
    hours = script.num_iterations * (sampling + update) / 3600
    print(
        f"\nassumed: prompts of {prompt_len:g} tokens, responses of {response_len:g} in {steps:g} "
        f"steps; a GPU samples {args.sample_rate:g} tokens/s, trains at {args.tflops:g} TFLOPS\n"
        f"an iteration: {tokens['sample']:,.0f} tokens of responses, {tokens['rollouts']:,.0f} of "
        f"rollouts, {trained:,.0f} trained on\n"
        f"{minibatches * script.update_epochs} optimizer steps, at each of which a rank sends "
        f"{sent:.1f} GiB\n"
        f"{sampling:.0f} s of sampling, {update:.0f} s of log-probs and update; "
        f"{script.num_iterations} iterations: {hours:.1f} hours\n"
        "(without evaluation, communication, and waiting for the slowest rank)"
    )


if __name__ == "__main__":
    main(tyro.cli(Args))
