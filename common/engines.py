"""Models: load them, train them with DeepSpeed, lend them to the GPU, score tokens."""

import contextlib
import functools

import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from common import ranks, require
from given import chat, weights
from given import model as given


def dtype_of(args) -> str:
    has_bfloat16 = torch.cuda.is_available() and torch.cuda.is_bf16_supported(False)  # not on a T4
    auto = "bfloat16" if has_bfloat16 else "float32"
    return auto if args.dtype == "auto" else args.dtype


def load_tokenizer(args):
    """The tokenizer of --model. Raises UsageError for a model that cannot be used or that was not
    made for --max-model-len tokens, and for --chat without a chat template."""
    config, tokenizer = given.load(args.model, args.trust_remote_code)
    text_config = config.get_text_config()
    longest = getattr(text_config, "max_position_embeddings", args.max_model_len)
    what = f"--max-model-len {args.max_model_len}: {args.model} supports at most {longest}"
    require(args.max_model_len <= longest, f"{what} tokens")
    chat.check(args, tokenizer, config)
    return tokenizer


def count_tokens(tokenizer) -> int:
    """1 + the largest id that can be decoded."""
    return max(tokenizer.get_vocab().values()) + 1


def load_model(args, tokenizer, folder: str = "") -> torch.nn.Module:
    """The causal language model of --model, or of a checkpoint folder, in evaluation mode. Some
    vocabularies are padded (DeepSeekMath: 102,400 rows for 100,015 tokens). Logits of the padding,
    which cannot be decoded, are cut off, as in the sampler. Raises UsageError where weights are
    missing, or where log-probs would be wrong."""
    from transformers import AutoModelForCausalLM

    path, trust = folder or args.model, args.trust_remote_code
    model, report = AutoModelForCausalLM.from_pretrained(
        path,
        dtype=dtype_of(args),
        trust_remote_code=trust,
        use_safetensors=None if trust else True,
        output_loading_info=True,
    )
    given.check_weights(path, report)
    num_tokens = count_tokens(tokenizer)
    if getattr(model.config, "attn_logit_softcapping", None):
        model.set_attn_implementation("eager")  # Gemma 2: SDPA would silently skip that
    weights.check_head(model.eval())
    head = model.get_output_embeddings()
    if num_tokens < len(head.weight):
        head.register_forward_hook(lambda _, inputs, logits: logits[..., :num_tokens])
    if model.generation_config:
        given.allow_sampling(model.generation_config)
    return model


def initialize(model: torch.nn.Module, args):
    """A DeepSpeed engine: AdamW (0.9, 0.999) without weight decay, gradients clipped, dropout off:
    even in the update, since the old log-probs have none."""
    import deepspeed

    dist.barrier()  # for slow disks: the group that DeepSpeed makes next waits less long
    # its C++ module for ranks that share memory serves inference only, and would need a compiler
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    adamw = {"betas": (0.9, 0.999), "weight_decay": 0.0, "torch_adam": True}
    config = {
        "train_micro_batch_size_per_gpu": 1,  # a dummy: we cut micro-batches ourselves
        "gradient_clipping": args.max_grad_norm,
        "zero_optimization": {"stage": args.zero_stage},
        "bf16": {"enabled": dtype_of(args) == "bfloat16"},
        "optimizer": {"type": "AdamW", "params": adamw},
    }
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config
    )
    if args.gradient_checkpointing:
        checkpoint_activations(engine.module)
    engine.eval()
    return engine


def checkpoint_activations(model: torch.nn.Module) -> None:
    """Layers keep only their inputs, and run again in the backward pass. (transformers' own way
    works only in training mode, which has dropout.)"""
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers = [one for one in model.modules() if isinstance(one, GradientCheckpointingLayer)]
    require(layers, "--gradient-checkpointing: this model does not support it; leave it out")
    for layer in layers:
        layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)


def step(engine, learning_rate: float) -> float:
    """One optimizer step of a DeepSpeed engine; returns its gradients' norm before clipping."""
    for group in engine.optimizer.param_groups:
        group["lr"] = learning_rate
    # DeepSpeed reports the norm, except for ZeRO 0 in float32.
    grads = [p.grad for p in engine.module.parameters() if p.grad is not None]
    norm = float(torch.nn.utils.get_total_norm(grads)) if grads else 0.0
    engine.step()
    return float(engine.get_global_grad_norm() or norm)


def discard_gradients(engine) -> None:
    """Forgets the gradients of the backward passes since the last step, so that it can be skipped.
    DeepSpeed has no call for that: ZeRO 2 keeps reduced gradients in lists of its own, the bf16
    optimizer of ZeRO 0 keeps them in float32."""
    engine.zero_grad()
    engine.optimizer.zero_grad()  # those in float32; ZeRO 3 counts micro-batches there
    for name in ("averaged_gradients", "all_grad_tensors"):
        getattr(engine.optimizer, name, {}).clear()


def score(
    model: torch.nn.Module, hidden: torch.Tensor, tokens: torch.Tensor, temperature: float
) -> torch.Tensor:
    """(N, H), (N,) -> (N,) log-probs of the tokens. The output head runs in chunks, which the
    backward pass computes again, so float32 logits exist for 1,024 tokens at most at a time."""
    model = getattr(model, "module", model)  # of a DeepSpeed engine
    head, config = model.get_output_embeddings(), model.config

    def score_chunk(hidden: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        logits = weights.finish(head(hidden), config).float() / temperature  # (n, V)
        return -torch.nn.functional.cross_entropy(logits, tokens, reduction="none")

    chunks = list(zip(hidden.split(1024), tokens.split(1024), strict=True))
    if hasattr(head.weight, "ds_id"):  # ZeRO 3: all ranks gather the head for each chunk
        most = max(ranks.gather([len(chunks)]))
        chunks += [(hidden[:0], tokens[:0])] * (most - len(chunks))
    return torch.cat([checkpoint(score_chunk, *chunk, use_reentrant=False) for chunk in chunks])


def whole(parameters):
    """A context in which each rank holds whole weights, which ZeRO 3 splits over the ranks. All
    ranks must enter it together. With other stages it does nothing."""
    parts = list({id(p): p for p in parameters if hasattr(p, "ds_id")}.values())
    if not parts:
        return contextlib.nullcontext()
    import deepspeed

    return deepspeed.zero.GatheredParameters(parts)


@contextlib.contextmanager
def lend(model: torch.nn.Module, device: torch.device):
    """A context in which the weights of `model` are on the device. The CPU's memory keeps its copy,
    so nothing is copied back."""
    tensors = [*model.parameters(), *model.buffers()]
    kept = [tensor.data for tensor in tensors]
    for tensor in tensors:
        tensor.data = tensor.data.to(device)
    yield
    for tensor, data in zip(tensors, kept, strict=True):
        tensor.data = data
    if device.type == "cuda":
        torch.cuda.empty_cache()  # freed blocks would fit few of the update's tensors


CHUNK = 2**24  # elements converted to float32 at a time: vLLM needs the rest of the memory


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
