"""Processes, batches, the run folder and checkpoints: plumbing that is not an algorithm."""

import contextlib
import ctypes
import dataclasses
import functools
import glob
import hashlib
import importlib.util
import json
import math
import os
import random
import shutil
import signal
import socket
import sys
import threading
import time
import warnings

import safetensors.torch
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm

from common import RunError, UsageError, grading, require

# ---- processes -----------------------------------------------------------------------------------


PR_SET_PDEATHSIG = 1


def set_up_processes() -> tuple[int, int]:
    """(rank, world size). Without torchrun it fills in the variables of a single process."""
    if "RANK" not in os.environ:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        single = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1}
        os.environ.update({name: str(value) for name, value in single.items()})
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    else:  # where torchrun is killed, its ranks must not go on, beside those of the next start
        ctypes.CDLL("libc.so.6").prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        # a kernel for each shape of batch is kept; at its default, 1,024, memory grows for hours
        os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64")
        os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")  # 15 s for one small function of vLLM
    # DeepSpeed compiles with ninja, which pip puts beside this Python and not on everyone's PATH
    os.environ["PATH"] = os.path.dirname(sys.executable) + os.pathsep + os.environ["PATH"]
    sys.stdout.reconfigure(errors="backslashreplace")  # a model writes what no terminal shows
    os.environ.setdefault("DS_LOG_LEVEL", "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    warnings.filterwarnings("ignore", category=FutureWarning)  # of the engines, about each other
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def local_rank() -> int:
    return int(os.environ["LOCAL_RANK"])


def resolve_dtype(dtype: str) -> str:
    return {"auto": "bfloat16" if torch.cuda.is_available() else "float32"}.get(dtype, dtype)


def seed_of(*parts: int | str) -> int:
    """A seed for one purpose, e.g. seed_of(seed, iteration, "rollouts", rank)."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:7])


def share(items: list) -> list:
    """This rank's contiguous share; the sizes of the ranks' shares differ by one at most."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    return items[len(items) * rank // world_size : len(items) * (rank + 1) // world_size]


def gather(items: list) -> list:
    """The shares of all ranks in order, on every rank."""
    shares: list = [None] * dist.get_world_size()
    dist.all_gather_object(shares, items)
    return [item for part in shares for item in part]


# ---- batches -------------------------------------------------------------------------------------


def check_args(args) -> None:
    """Raises UsageError for flags out of range, of those that several scripts have."""
    names = ("num_prompts", "group_size", "minibatch_size", "num_iterations", "update_epochs")
    names += ("max_response_len", "micro_batch_tokens", "eval_problems", "eval_rounds")
    names += ("save_every", "keep_checkpoints", "batch_size")
    check_at_least_1(args, *(name for name in names if hasattr(args, name)))
    require(args.grace_seconds >= 0, f"--grace-seconds {args.grace_seconds}: must be 0 or more")
    if hasattr(args, "temperature"):
        check_sampling(args, "temperature", "eval_temperature")
    require(args.eval_every >= 0, f"--eval-every {args.eval_every}: must be 0 (never) or more")
    positive = ("learning_rate", "max_grad_norm", "clip_coef", "clip_coef_value")
    for name in (*positive, "critic_learning_rate"):
        value = getattr(args, name, 1)
        require(value > 0, f"--{name.replace('_', '-')} {value}: must be above 0")
    require(getattr(args, "kl_coef", 0) >= 0, f"--kl-coef {getattr(args, 'kl_coef', 0)}: below 0")
    require(
        0 <= args.warmup_fraction <= 1,
        f"--warmup-fraction {args.warmup_fraction}: must be between 0 and 1",
    )


def check_batch(args, num_responses: int) -> None:
    """Raises UsageError for flags that make no batch of `num_responses` responses."""
    check_args(args)
    require(
        num_responses % args.minibatch_size == 0,
        f"--minibatch-size {args.minibatch_size} does not divide the {num_responses} responses of "
        f"an iteration (--num-prompts {args.num_prompts} x --group-size {args.group_size})",
    )


def check_sampling(args, *temperatures: str) -> None:
    for name in temperatures:
        value = getattr(args, name)
        require(
            0 < value <= 2, f"--{name.replace('_', '-')} {value}: must be above 0 and at most 2"
        )
    require(0 < args.top_p <= 1, f"--top-p {args.top_p}: must be above 0 and at most 1")
    require(
        args.max_response_len < args.max_model_len,
        f"--max-response-len {args.max_response_len} leaves no room for a prompt in "
        f"--max-model-len {args.max_model_len}",
    )


def describe_batch(args, num_problems: int, num_loaded: int) -> str:
    num_responses = args.num_prompts * args.group_size
    num_minibatches = num_responses // args.minibatch_size
    idle = dist.get_world_size() - args.num_prompts
    return (
        f"{args.num_prompts} prompts x {args.group_size} responses = {num_responses} episodes = "
        f"{num_minibatches} minibatches x {args.update_epochs} epochs = "
        f"{num_minibatches * args.update_epochs} optimizer steps an iteration, on "
        f"{dist.get_world_size()} ranks{f', {idle} without a prompt' if idle > 0 else ''}; "
        f"{num_problems} problems "
        f"({num_loaded - num_problems} dropped for the length of their prompt)"
    )


def check_at_least_1(args, *names: str) -> None:
    for name in names:
        value = getattr(args, name)
        require(value >= 1, f"--{name.replace('_', '-')} {value}: must be at least 1")


def draw(num_items: int, start: int, count: int, *seed: int | str) -> list[int]:
    """Items start ... start + count - 1 of an endless stream of shuffled epochs: no repeats inside
    an epoch, the same on every rank, and nothing to skip on resume."""
    indices: list[int] = []
    while len(indices) < count:
        epoch, position = divmod(start + len(indices), num_items)
        order = shuffled(num_items, seed_of(*seed, epoch, "epoch"))
        indices += order[position : position + count - len(indices)]
    return indices


@functools.lru_cache(maxsize=4)  # an epoch of many draws is shuffled once
def shuffled(num_items: int, seed: int) -> tuple[int, ...]:
    order = list(range(num_items))
    random.Random(seed).shuffle(order)
    return tuple(order)


def make_micro_batches(rows: list[int], lengths: list[int], max_tokens: int) -> list[list[int]]:
    """Rows grouped so that a group, padded to its longest row, holds at most `max_tokens` tokens (a
    longer row stands alone). Sorted by length, so that padding is small."""
    batches: list[list[int]] = []
    for row in sorted(rows, key=lengths.__getitem__):
        if not batches or (len(batches[-1]) + 1) * lengths[row] > max_tokens:
            batches.append([])
        batches[-1].append(row)
    return batches


def plan_passes(rows, lengths: list[int], max_tokens: int) -> list[tuple[list[int], float]]:
    """This rank's micro-batches of `rows`, each with weight 1.0, then as many with weight 0.0 as it
    takes for every rank to make the same number of passes: collectives wait for all ranks."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    by_length = sorted(rows, key=lengths.__getitem__)  # dealt out in turn: ranks do like work
    cuts = [
        make_micro_batches(by_length[r::world_size], lengths, max_tokens) for r in range(world_size)
    ]
    padding = max(map(len, cuts)) - len(cuts[rank])
    return [(cut, 1.0) for cut in cuts[rank]] + [(by_length[:1], 0.0)] * padding


def take(
    rows: list[int],
    device: torch.device,
    input_ids: torch.Tensor,
    prompt_lens: torch.Tensor,
    response_mask: torch.Tensor,
) -> list[torch.Tensor]:
    """These rows of (B, L), (B,), (B, T) on the device; L is cut to the longest among them."""
    longest = int((prompt_lens[rows] + response_mask[rows].sum(dim=1)).max())
    tensors = input_ids[rows, :longest], prompt_lens[rows], response_mask[rows]
    return [tensor.to(device) for tensor in tensors]


def count_padding(passes: list[tuple[list[int], float]], lengths: list[int]) -> int:
    """Tokens of these passes that are padding, and all of those that weigh nothing."""
    return sum(
        max(lengths[row] for row in rows) * len(rows) - weight * sum(lengths[row] for row in rows)
        for rows, weight in passes
    )


def mean_of(dicts: list[dict[str, float]]) -> dict[str, float]:
    """The mean of each key over the dicts that have it."""
    names = {name: None for one in dicts for name in one}
    values = {name: [one[name] for one in dicts if name in one] for name in names}
    return {name: sum(some) / len(some) for name, some in values.items()}


# ---- engines -------------------------------------------------------------------------------------


def step(engine, learning_rate: float, loss: float = 0.0) -> float:
    """One optimizer step of a DeepSpeed engine; the norm of its gradients before clipping. Where
    that or the loss is not finite, there is no step, and the gradients are gone."""
    for group in engine.optimizer.param_groups:
        group["lr"] = learning_rate
    # ZeRO 0 in float32 is the one case in which DeepSpeed does not report the norm.
    grads = [p.grad for p in engine.module.parameters() if p.grad is not None]
    norm = float(torch.nn.utils.get_total_norm(grads)) if grads else 0.0
    if not math.isfinite(norm + loss):  # the norm: what DeepSpeed checks in its other cases
        discard_gradients(engine)
        return math.nan
    engine.step()
    return float(engine.get_global_grad_norm() or norm)


def discard_gradients(engine) -> None:
    """Forgets the gradients of the backward passes since the last step, so that it can be skipped.

    DeepSpeed has no call for that: ZeRO 2 keeps reduced gradients in lists of its own, the bf16
    optimizer of ZeRO 0 keeps them in float32.
    """
    engine.zero_grad()
    engine.optimizer.zero_grad()  # those in float32; ZeRO 3 counts micro-batches there
    for name in ("averaged_gradients", "all_grad_tensors"):
        getattr(engine.optimizer, name, {}).clear()


def whole(parameters):
    """In this context each rank has all of the weights that ZeRO 3 spreads over the ranks, which
    must enter it together; with any other stage it does nothing."""
    parts = list({id(p): p for p in parameters if hasattr(p, "ds_id")}.values())
    if not parts:
        return contextlib.nullcontext()
    import deepspeed

    return deepspeed.zero.GatheredParameters(parts)


def largest(number: int) -> int:
    """Of the ranks' numbers; all ranks must call it."""
    tensor = torch.tensor(number)
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return int(tensor)


@contextlib.contextmanager
def lend(model: torch.nn.Module, device: torch.device):
    """In this context the weights of `model` are on the device. The host keeps its own, so nothing
    has to be copied back."""
    tensors = [*model.parameters(), *model.buffers()]
    kept = [tensor.data for tensor in tensors]
    for tensor in tensors:
        tensor.data = tensor.data.to(device)
    yield
    for tensor, data in zip(tensors, kept, strict=True):
        tensor.data = data
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what is freed would fit few of the update's tensors


CHUNK = 2**24  # elements of a tensor that are float32 at a time, while vLLM needs the memory


@torch.no_grad()
def weight_distance(model: torch.nn.Module, start: torch.nn.Module) -> float:
    """L2 distance of the weights from those of `start`, relative to the norm of the latter."""
    distance = norm = 0.0
    for pair in zip(model.parameters(), start.parameters(), strict=True):
        with whole(pair[:1]):
            for new, old in zip(*(p.flatten().split(CHUNK) for p in pair), strict=True):
                old = old.to(new.device).float()
                distance += (new.float() - old).square().sum()
                norm += old.square().sum()
    return (distance / norm).sqrt().item()


def check_model(model: str, max_model_len: int, trust_remote_code: bool = False) -> None:
    """Raises UsageError unless `model` is a checkpoint folder, or the name of one on the hub, for
    sequences of `max_model_len` tokens; with code of its own, or with weights that are pickles
    (which run code when they are read), only where that is trusted."""
    from safetensors import safe_open
    from transformers import AutoConfig, AutoTokenizer  # seconds
    from transformers.utils import cached_file

    is_hub_name = model.count("/") == 1 and not model.startswith((".", "/", "~", "runs/"))
    hint = "; `python sft.py` makes it" if model == "runs/sft/hf" else ""
    require(os.path.isdir(model) or is_hub_name, f"--model {model}: no such folder{hint}")
    try:
        config = AutoConfig.from_pretrained(model, trust_remote_code=trust_remote_code)
        tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=trust_remote_code)
        for weights in glob.glob(os.path.join(glob.escape(model), "*.safetensors")):
            safe_open(weights, "pt")  # reads the header: a file that was cut off fails here
        names = ("model.safetensors.index.json", "model.safetensors")  # of the hub: downloads one
        missing = {"_raise_exceptions_for_missing_entries": False}
        has_safetensors = any(cached_file(model, name, **missing) for name in names)
    except Exception as error:  # transformers raises anything, KeyError included
        reason = " ".join(str(error).split())[:300]
        require(
            "trust_remote_code" not in str(error),
            f"--model {model}: runs code of its own; read it, then --trust-remote-code",
        )
        what = "no such folder, nor on the hub" if not os.path.isdir(model) else "not a checkpoint"
        raise UsageError(f"--model {model}: {what} ({reason})") from None
    require(tokenizer.eos_token_id is not None, f"--model {model}: its tokenizer has no EOS token")
    num_tokens, rows = tokenizer.vocab_size, getattr(config, "vocab_size", tokenizer.vocab_size)
    require(
        num_tokens <= rows,
        f"--model {model}: its tokenizer has {num_tokens} tokens, its embeddings {rows} rows: it "
        "is another model's tokenizer",
    )
    longest = getattr(config, "max_position_embeddings", max_model_len)
    require(
        max_model_len <= longest,
        f"--max-model-len {max_model_len}: {model} was made for at most {longest} tokens",
    )

    if not has_safetensors:
        has_pickles = is_hub_name or glob.glob(os.path.join(glob.escape(model), "*.bin"))
        require(has_pickles, f"--model {model}: not a checkpoint (no model.safetensors in it)")
        require(
            trust_remote_code,
            f"--model {model}: has no model.safetensors, only pickles, which can run code; where "
            "you trust them: --trust-remote-code",
        )
    if getattr(tokenizer, "chat_template", None) and os.environ.get("RANK", "0") == "0":
        print(f"note: {model} has a chat template; it is not used, prompts are plain text")


def count_tokens(tokenizer) -> int:
    """1 + the largest id that can be decoded."""
    return max(tokenizer.get_vocab().values()) + 1


def load_model(model: str, dtype: str, trust_remote_code: bool = False) -> torch.nn.Module:
    """A causal language model for `check_model`'s kind of name, in evaluation mode.

    Where its vocabulary is padded beyond the tokenizer's (DeepSeekMath: 102,400 rows for 100,015
    tokens) the head's logits end with the last token, as the sampler's do: what cannot be decoded
    has no probability.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    options = {"use_safetensors": None if trust_remote_code else True}
    options["trust_remote_code"] = trust_remote_code
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=dtype, **options).eval()
    tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=trust_remote_code)
    head, num_tokens = loaded.get_output_embeddings(), count_tokens(tokenizer)
    if num_tokens < len(head.weight):
        head.register_forward_hook(lambda _, inputs, logits: logits[..., :num_tokens])
    return loaded


def checkpoint_activations(model: torch.nn.Module) -> None:
    """Layers keep their inputs alone and run again in the backward pass. (transformers' own way
    works in training mode only, which has dropout.)"""
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers = [one for one in model.modules() if isinstance(one, GradientCheckpointingLayer)]
    require(layers, "--gradient-checkpointing: this model's layers do not support it")
    for layer in layers:
        layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)


# ---- the run folder ------------------------------------------------------------------------------

SHOWN = {
    **{"rollout/reward": "reward", "loss/sft": "loss", "eval/pass@1": "pass@1"},
    **{"eval/loss": "eval loss", "adv/undecided": "undecided", "policy/grad_norm": "grad norm"},
    **{"dpo/chosen_logratio": "chosen", "dpo/rejected_logratio": "rejected"},
    **{"policy/weight_distance": "weights moved", "policy/sampler_gap": "sampler gap"},
}


# may change when a run goes on: results do not, but for float noise
FREE_SETTINGS = ("resume", "output_dir", "track", "save_every", "keep_checkpoints", "on_nan")
FREE_SETTINGS += ("gpu_memory_utilization", "micro_batch_tokens", "grace_seconds")
FREE_SETTINGS += ("gradient_checkpointing",)
# Mean |log-prob of the sampler - of the trainer| over tokens above which a run stops: 1,000 times
# what kernels that differ cause. (A learning rate of 1e-6 stays below it in bfloat16 for long.)
MAX_SAMPLER_GAP = {"float32": 1e-4, "bfloat16": 0.1}


class Run:
    """A folder with args.json, metrics.jsonl, episodes.jsonl, tensorboard/ and checkpoints/; and hf
    and best, the newest checkpoint and that with the highest pass@1 (sft.py: the lowest loss) on
    validation problems, in the form that transformers, vLLM and evaluate.py load."""

    def __init__(self, script: str, args):
        """Checks the folder and writes nothing. Raises UsageError for a folder that holds a run
        which is not to be resumed, for a resume of nothing, or of a run with other settings."""
        rank, world_size = set_up_processes()
        script = os.path.splitext(os.path.basename(script))[0]
        self.folder = args.output_dir or f"runs/{script}-{args.task}-seed{args.seed}"
        self.args, self.is_main = args, rank == 0
        self.dtype = resolve_dtype(args.dtype)
        self.settings = {**dataclasses.asdict(args), "script": script, "world_size": world_size}
        for name in FREE_SETTINGS:
            self.settings.pop(name, None)
        if not self.is_main:
            return
        has_wandb = not args.track or importlib.util.find_spec("wandb")
        require(has_wandb, "--track needs Weights & Biases: .venv/bin/pip install wandb")
        path = os.path.join(self.folder, "args.json")
        if args.resume == "no":
            require(
                not os.path.exists(path)
                and not glob.glob(os.path.join(self.folder, "checkpoints", "*")),
                f"{self.folder} already holds a run: go on with it (--resume auto) or name another "
                "--output-dir",
            )
            return
        require(os.path.exists(path), f"--resume {args.resume}: no run to resume in {self.folder}")
        with open(path) as file:
            saved = json.load(file)
        differing = compare_settings(saved, self.settings)
        require(
            not differing,
            f"--resume {args.resume}: {self.folder} was made with other settings: {differing}",
        )

    def open(self, engines: dict, total: int) -> int:
        """Loads the newest checkpoint that is whole, if there is one; returns how many of `total`
        are done. Raises UsageError where none is whole, or it is another run's."""
        os.makedirs(os.path.join(self.folder, "checkpoints"), exist_ok=True)
        self.check_shared()
        done = self.find_whole()
        for name, engine in engines.items() if done else ():
            path, _ = engine.load_checkpoint(self.path(done), tag=name)
            require(path, f"{self.path(done)}: no state of {name!r} in it")
        if self.is_main:
            path = os.path.join(self.folder, "args.json")
            with open(path + ".tmp", "w") as file:
                json.dump(self.settings, file, indent=1)
            os.replace(path + ".tmp", path)
            self.keep_lines("metrics.jsonl", done)
            self.keep_lines("episodes.jsonl", done)
            if done:
                self.tidy_up()  # a kill may have come between the checkpoint and its link
            from torch.utils.tensorboard import SummaryWriter

            folder = os.path.join(self.folder, "tensorboard")
            self.tensorboard = SummaryWriter(folder, purge_step=done + 1)
            if self.args.track:
                import wandb

                name = os.path.basename(os.path.normpath(self.folder))
                options = {"config": self.settings, "dir": self.folder, "resume": "allow"}
                wandb.init(project="vineppo-in-a-file", id=name, **options)
        self.bar = tqdm(
            total=total,
            initial=done,
            disable=not self.is_main,
            mininterval=0.1 if sys.stderr.isatty() else 30,
        )
        self.iteration = done + 1
        self.phases: dict[str, float] = {}
        self.phase_name, self.phase_start = "", time.perf_counter()
        self.terminated = self.stopping = False  # this rank was; all ranks know that one was
        signals, wakeup = socket.socketpair()
        wakeup.setblocking(False)
        signal.set_wakeup_fd(wakeup.fileno())
        # the thread acts: this one may wait for other ranks for minutes, outside of Python
        signal.signal(signal.SIGTERM, lambda *_: None)
        threading.Thread(target=self.wait_for_sigterm, args=(signals, wakeup), daemon=True).start()
        return done

    def wait_for_sigterm(self, signals: socket.socket, _) -> None:
        while signals.recv(1)[0] != signal.SIGTERM:
            pass
        grace = self.args.grace_seconds
        end = threading.Timer(max(grace, 0.5), os._exit, [128 + signal.SIGTERM])
        end.daemon = True
        end.start()  # whatever the run is doing then: a kill harms no checkpoint
        self.terminated = True
        self.say(
            "SIGTERM: the run saves this iteration and ends; where that takes more than "
            f"--grace-seconds {grace:g}, it ends at checkpoint {max(self.checkpoints(), default=0)}"
        )
        sys.stdout.flush()

    def find_whole(self) -> int:
        """The newest checkpoint whose files are those of its manifest, 0 where there is none at
        all. The damaged ones after it are given another name."""
        (found,) = gather([self.checkpoints()] if self.is_main else [])
        damaged = []
        for iteration in reversed(found):
            path = self.path(iteration)
            (manifest,) = gather([read_manifest(path)] if self.is_main else [])
            names = sorted(manifest.get("files", ()))
            sums = gather([digest(os.path.join(path, name)) for name in share(names)])
            damage = [n for n, s in zip(names, sums, strict=True) if s != manifest["files"][n]]
            if names and not damage:
                break
            damaged.append(iteration)
            what = ", ".join(damage) or "manifest.json"
            self.say(f"WARNING: checkpoint {iteration} is damaged ({what}): passed by")
        else:
            require(
                not found, f"{self.folder}: all of its checkpoints are damaged; start a new run"
            )
            return 0
        differing = compare_settings(manifest["settings"], self.settings)
        require(not differing, f"{path}: not of this run: {differing}")
        for bad in damaged if self.is_main else ():
            os.replace(self.path(bad), f"{self.folder}/checkpoints/damaged_{bad}_{time.time():.0f}")
        return iteration

    def check_shared(self) -> None:
        """Raises UsageError where a rank does not see the folder that rank 0 writes to."""
        name = os.path.join(self.folder, f"seen_by_all_{time.time_ns()}")
        (name,) = gather([name] if self.is_main else [])
        if self.is_main:
            open(name, "w").close()
        dist.barrier()
        blind = gather([] if os.path.exists(name) else [socket.gethostname()])
        if self.is_main:
            os.remove(name)
        require(
            not blind,
            f"--output-dir {self.folder}: {', '.join(sorted(set(blind)))} does not see what rank 0 "
            "writes there: it must be a folder that all nodes share",
        )

    def keep_lines(self, name: str, done: int) -> None:
        """Drops what a killed run wrote after its newest checkpoint, half a line included."""
        path, lines = os.path.join(self.folder, name), []
        if os.path.exists(path):
            with open(path) as file:
                complete = [line for line in file if line.endswith("\n")]
            lines = [line for line in complete if json.loads(line)["iteration"] <= done]
        with open(path + ".tmp", "w") as file:
            file.writelines(lines)
        os.replace(path + ".tmp", path)

    def phase(self, name: str) -> None:
        """From now on time counts for this phase; metrics.jsonl gets the seconds as time/<name>."""
        now = time.perf_counter()
        if self.phase_name:
            key = f"time/{self.phase_name}"
            self.phases[key] = self.phases.get(key, 0.0) + now - self.phase_start
        self.phase_name, self.phase_start = name, now
        self.bar.set_description(name, refresh=sys.stderr.isatty())

    def say(self, text: str) -> None:
        if self.is_main:
            tqdm.write(text)

    def log(self, iteration: int, metrics: dict[str, float]) -> None:
        """Ends the phase and appends a line to metrics.jsonl. (The time of a save, which comes
        after the line that it makes safe, counts in the next line.) All ranks must call it."""
        self.phase("")
        seconds = sum(self.phases.values())
        line = {"iteration": iteration, **metrics, **self.phases, "time/iteration": seconds}
        of_ranks = gather([(grading.worker.take_failures(), self.terminated)])
        failures, stopping = zip(*of_ranks, strict=True)
        if sum(failures):
            line["rollout/grading_failures"] = sum(failures)
        self.stopping = any(stopping)  # one answer for all ranks
        self.phases, self.iteration = {}, iteration + 1
        ctypes.CDLL("libc.so.6").malloc_trim(0)  # or what the C library keeps grows for hours
        if self.is_main:
            self.append("metrics.jsonl", line)
            for name, value in line.items():
                self.tensorboard.add_scalar(name, value, iteration)
            self.tensorboard.flush()
            if self.args.track:
                import wandb

                wandb.log(line, step=iteration)
        shown = [f"{SHOWN[name]} {line[name]:.3g}" for name in SHOWN if name in line]
        self.shows_episode = iteration == 1 or "eval/pass@1" in line
        if line.keys() & {"rollout/reward", "eval/loss", "eval/pass@1"}:
            self.say(f"{iteration}: {', '.join(shown)}, {seconds:.1f} s")
        self.bar.set_postfix_str("".join(shown[:1]), refresh=False)
        self.bar.update()

    def check(self, numbers: dict[str, float], batch: dict[str, torch.Tensor]) -> None:
        """Stops where a number is not finite, or sampler and trainer differ: RunError, after
        writing the batch to <folder>/stopped_<iteration>.pt. With --on-nan skip numbers that are
        not finite leave the dict, which gets "policy/skipped" 1, and in the batch they become NaN,
        so that no minibatch with one makes a step. All ranks must call it alike."""
        gap, limit = numbers.get("policy/sampler_gap", 0.0), MAX_SAMPLER_GAP[self.dtype]
        broken = {name: x for name, x in numbers.items() if not math.isfinite(x)}
        if not broken and gap <= limit:
            return
        path = os.path.join(self.folder, f"stopped_{self.iteration:06d}.pt")
        where = f"iteration {self.iteration}: "
        if self.is_main:
            torch.save({**batch, **numbers}, path)
        if gap > limit:
            raise RunError(
                f"{where}policy/sampler_gap is {gap:.2g}, above {limit:g}: vLLM has other weights "
                f"than the trainer, or computes otherwise (run.MAX_SAMPLER_GAP); see {path}"
            )
        what = ", ".join(f"{name} is {x}" for name, x in broken.items())
        if self.args.on_nan == "stop":
            raise RunError(
                f"{where}{what}; the batch is in {path}, the last checkpoint is from before it "
                "(--resume auto; --on-nan skip passes such minibatches by)"
            )
        self.say(f"WARNING: {where}{what}; passed by, the batch is in {path}")
        for name in broken:
            del numbers[name]
        numbers["policy/skipped"] = 1.0
        for tensor in filter(torch.is_floating_point, batch.values()):
            tensor[~tensor.isfinite()] = torch.nan

    def episode(
        self,
        iteration: int,
        prompt: str,
        texts: list[str],
        values: list[float],
        advantages: list[float],
        reward: float,
    ) -> None:
        """Appends a response, step by step, to episodes.jsonl, and shows one now and then."""
        if not self.is_main:
            return
        steps = [
            {"text": text, "value": value, "advantage": advantage}
            for text, value, advantage in zip(texts, values, advantages, strict=True)
        ]
        line = {"iteration": iteration, "prompt": prompt, "reward": reward, "steps": steps}
        self.append("episodes.jsonl", line)
        if self.shows_episode:
            rows = [f"  {s['value']:5.2f} {s['advantage']:+9.2f}  {s['text']!r}" for s in steps]
            self.say("\n".join([f"  {prompt!r}", "  value advantage  step", *rows]))
            self.say(f"  reward {reward:g}")
        self.shows_episode = False

    def append(self, name: str, line: dict) -> None:
        with open(os.path.join(self.folder, name), "a") as file:
            file.write(json.dumps(line) + "\n")

    def path(self, iteration: int) -> str:
        return os.path.join(self.folder, "checkpoints", f"iteration_{iteration:06d}")

    def checkpoints(self) -> list[int]:
        names = os.listdir(os.path.join(self.folder, "checkpoints"))
        return sorted(int(name[10:]) for name in names if name.startswith("iteration_"))

    def save(self, iteration: int, engines: dict, model: torch.nn.Module, tokenizer) -> None:
        """All ranks must call it. Written aside, then renamed: a kill leaves the last good one.

        Ends the process after a SIGTERM. Raises RunError where it cannot be written."""
        self.phase("save")
        aside = os.path.join(self.folder, "checkpoints", "unfinished")
        try:
            self.write(aside, engines, model, tokenizer)
        except Exception as error:  # a full disk comes as an error of three libraries
            if self.is_main:
                shutil.rmtree(aside, ignore_errors=True)  # room for whoever needs it
            last = max(self.checkpoints(), default=None)
            safe = f"checkpoint {last} is intact" if last else "there is no other one yet"
            raise RunError(
                f"checkpoint {iteration} could not be written to {self.folder} ({error}); {safe}: "
                "mend that (is the disk full?), then --resume auto"
            ) from error
        if self.is_main:
            os.replace(aside, self.path(iteration))
            flush_to_disk(os.path.dirname(aside))
            self.tidy_up()
        dist.barrier()
        if self.stopping and iteration != self.bar.total:
            self.say(f"SIGTERM: checkpoint {iteration} is written; --resume auto goes on with it")
            sys.stdout.flush()
            os._exit(128 + signal.SIGTERM)

    def write(self, aside: str, engines: dict, model: torch.nn.Module, tokenizer) -> None:
        if self.is_main:
            shutil.rmtree(aside, ignore_errors=True)
        dist.barrier()
        for name, engine in engines.items():
            engine.save_checkpoint(aside, tag=name, save_latest=False)
        with whole(model.parameters()):
            if self.is_main:
                model.save_pretrained(os.path.join(aside, "hf"))
                tokenizer.save_pretrained(os.path.join(aside, "hf"))
        for name in engines.keys() - {"policy"}:  # weights alone, for analysis/values.py
            module = engines[name].module
            with whole(module.parameters()):
                if self.is_main:  # copies: ZeRO 2 keeps parameters as views of one buffer
                    weights = {k: v.clone() for k, v in module.state_dict().items()}
                    safetensors.torch.save_file(weights, os.path.join(aside, f"{name}.safetensors"))
        dist.barrier()
        paths = glob.glob(os.path.join(glob.escape(aside), "**"), recursive=True)
        names = sorted(os.path.relpath(path, aside) for path in paths if os.path.isfile(path))
        sums = gather([digest(os.path.join(aside, name)) for name in share(names)])
        if self.is_main:
            manifest = {"settings": self.settings, "files": dict(zip(names, sums, strict=True))}
            write_manifest(aside, manifest)
            logs = glob.glob(os.path.join(glob.escape(self.folder), "*.jsonl"))
            for path in [*paths, os.path.join(aside, "manifest.json"), *logs]:
                flush_to_disk(path)
        dist.barrier()

    def tidy_up(self) -> None:
        """Links hf and best to their checkpoints and removes those that are not to be kept."""
        scores = {}
        with open(os.path.join(self.folder, "metrics.jsonl")) as file:
            for line in map(json.loads, file):
                if line.keys() & {"eval/pass@1", "eval/loss"}:
                    loss = line.get("eval/loss", 0.0)
                    scores[line["iteration"]] = line.get("eval/pass@1", -loss)
        done = self.checkpoints()
        best = max((i for i in done if i in scores), key=scores.__getitem__, default=done[-1])
        self.link("hf", done[-1])
        self.link("best", best)
        for old in done[: -self.args.keep_checkpoints]:
            if old != best:
                shutil.rmtree(self.path(old))

    def link(self, name: str, iteration: int) -> None:
        """name -> the checkpoint of this iteration; never missing, not even for a moment."""
        link = os.path.join(self.folder, name)
        if os.path.lexists(link + ".tmp"):
            os.remove(link + ".tmp")
        target = os.path.join(self.path(iteration), "hf")
        os.symlink(os.path.relpath(target, self.folder), link + ".tmp")
        os.replace(link + ".tmp", link)

    def close(self) -> None:
        self.bar.close()
        if self.is_main:
            self.tensorboard.close()
            with open(os.path.join(self.folder, "finished"), "w"):
                pass
            self.say(f"checkpoint: {os.path.join(self.folder, 'hf')}")


def compare_settings(saved: dict, given: dict) -> str:
    """What differs, "" where nothing does."""
    names = sorted(saved.keys() | given.keys())
    differing = [name for name in names if saved.get(name) != given.get(name)]
    return "; ".join(f"{n} was {saved.get(n)!r}, is {given.get(n)!r}" for n in differing)


def write_manifest(folder: str, manifest: dict) -> None:
    body = json.dumps(manifest)
    with open(os.path.join(folder, "manifest.json"), "w") as file:
        json.dump({"sha256": hashlib.sha256(body.encode()).hexdigest(), "body": body}, file)


def read_manifest(folder: str) -> dict:
    """{} where it is not what was written."""
    try:
        with open(os.path.join(folder, "manifest.json")) as file:
            saved = json.load(file)
        intact = hashlib.sha256(saved["body"].encode()).hexdigest() == saved["sha256"]
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return {}
    return json.loads(saved["body"]) if intact else {}


def digest(path: str) -> str:
    """SHA-256 of a file, "" where there is none."""
    if not os.path.isfile(path):
        return ""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def flush_to_disk(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)
