"""How models compute logits from their head, and the names that vLLM has for weights."""

from collections.abc import Iterator

import torch

from common import require


def finish(logits: torch.Tensor, config) -> torch.Tensor:
    """Turns the logits of a model's head into the model's own: Granite and Cohere scale them,
    Gemma 2 caps them."""
    config = config.get_text_config()
    scale = getattr(config, "logit_scale", None) or 1.0
    scale /= getattr(config, "logits_scaling", None) or 1.0
    cap = getattr(config, "final_logit_softcapping", None)
    logits = logits if scale == 1.0 else logits * scale
    return torch.tanh(logits / cap) * cap if cap else logits


@torch.no_grad()
def check_head(model: torch.nn.Module) -> None:
    """Raises UsageError where the head on the last hidden states, then `finish`, does not give the
    logits of the model itself."""
    ids = torch.arange(8)[None] % model.config.get_text_config().vocab_size
    output = model(ids, output_hidden_states=True, use_cache=False)
    ours = finish(model.get_output_embeddings()(output.hidden_states[-1]), model.config)
    same = (output.logits - ours).abs().max() <= 0.01 * output.logits.abs().max()
    what = f"{type(model).__name__} computes logits in a way that this code does not know"
    require(same, f"--model: {what}, so log-probs would be wrong (given/weights.py)")


def named_weights(
    model: torch.nn.Module, has_head: bool
) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """(name, parameter). A head that is tied to the embeddings comes again under its own name where
    vLLM `has_head`, which else keeps old weights. (In vLLM Gemma 2 has no head.)"""
    named = dict(model.named_parameters())
    head = model.get_output_embeddings()
    if model.config.tie_word_embeddings and has_head:
        (name,) = (name for name, module in model.named_modules() if module is head)
        named[f"{name}.weight"] = model.get_input_embeddings().weight
    yield from named.items()


def has_head(model: torch.nn.Module) -> bool:
    """Whether a model of vLLM's, or a part of it, has a head of its own."""
    return any(name.split(".")[-1] == "lm_head" for name, _ in model.named_modules())


def as_saved(model: torch.nn.Module, name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """A weight under the names that it has in a checkpoint. transformers holds all experts of a
    layer in one tensor; files and vLLM's loaders have a tensor for each."""
    from transformers.core_model_loading import revert_weight_conversion

    return revert_weight_conversion(model, {name: weight})


def leave_classes_alone() -> None:
    """vLLM has no code of its own for some models (GPT-NeoX, OLMo 2, SmolLM3). It runs their
    transformers classes and decorates these for torch.compile in the whole process, so that the
    trainer could not build its own model. Without the decoration, as here, a GPU samples a little
    slower."""
    from vllm.model_executor.models.transformers.base import Base

    Base._decorate_cls_for_torch_compile = lambda *_, **__: None


def pack_experts(model: torch.nn.Module) -> None:
    """On a CPU vLLM packs the experts' weights for its kernels when it loads them, but not when it
    gets new ones (0.32.0), which it would then misread as packed. This packs them."""
    for layer in model.modules():
        kernel = getattr(getattr(layer, "quant_method", None), "moe_kernel", None)
        if kernel is not None:
            kernel.fused_experts.process_weights_after_loading(layer)
