"""Can the folder, or the name on the hub, that --model names be used?"""

import glob
import os

from common import UsageError, require

REFUSED = {  # model types that vLLM 0.32.0 cannot sample from as they are trained
    "bloom": "vLLM cannot update the weights of its output head",
    "gpt_bigcode": "vLLM's code for it does not support its shared keys and values",
    "gpt_oss": "vLLM computes its experts wrongly after a weight update",
    "mpt": "vLLM no longer supports it",
}


def load(model: str, trust: bool):
    """(config, tokenizer) of a checkpoint folder, or of the name of one on the hub. Raises
    UsageError where the weights cannot be trained; and, unless `trust`, for a model with code of
    its own or with pickled weights (which run code when they are loaded)."""
    from safetensors import safe_open
    from transformers import AutoConfig, AutoTokenizer  # seconds
    from transformers.utils import cached_file

    where = f"--model {model}"
    require(glob.escape(model) == model, f"{where}: vLLM reads no path with *, ? or [: rename it")
    is_hub_name = model.count("/") == 1 and not model.startswith((".", "/", "~", "runs/"))
    hint = "; `python sft.py` makes it" if model == "runs/sft/hf" else ""
    require(os.path.isdir(model) or is_hub_name, f"{where}: no such folder{hint}")
    try:
        config = AutoConfig.from_pretrained(model, trust_remote_code=trust)
        # mistral_format: Mistral's newer files have a tokenizer of another library beside this one
        options = {"trust_remote_code": trust, "mistral_format": False}
        tokenizer = AutoTokenizer.from_pretrained(model, **options)
        for weights in glob.glob(f"{model}/*.safetensors"):
            safe_open(weights, "pt")  # reads the header, so a file that was cut off fails here
        names = ("model.safetensors.index.json", "model.safetensors")  # the hub sends one
        missing = {"_raise_exceptions_for_missing_entries": False}
        has_safetensors = any(cached_file(model, name, **missing) for name in names)
    except Exception as error:  # transformers raises anything, KeyError included
        reason = " ".join(str(error).split())[:300]
        needs_trust = "trust_remote_code" in str(error)
        hint = "has code of its own; read it, then allow it by --trust-remote-code"
        require(not needs_trust, f"{where}: {hint}")
        what = "not a checkpoint" if os.path.isdir(model) else "no such folder, nor on the hub"
        raise UsageError(f"{where}: {what} ({reason})") from None
    require(tokenizer.eos_token_id is not None, f"{where}: its tokenizer has no end token (EOS)")
    num_tokens, rows = tokenizer.vocab_size, config.get_text_config().vocab_size
    sizes = f"its tokenizer has {num_tokens} tokens, its embeddings {rows} rows"
    require(num_tokens <= rows, f"{where}: {sizes}: it is another model's tokenizer")
    added = max(tokenizer.eos_token_id, tokenizer.bos_token_id or 0)
    what = f"its tokenizer's EOS or BOS is token {added}, its embeddings have {rows} rows"
    require(added < rows, f"{where}: {what}: call resize_token_embeddings, then save it")
    if not has_safetensors:
        has_pickles = is_hub_name or glob.glob(f"{model}/*.bin")
        require(has_pickles, f"{where}: not a checkpoint (no model.safetensors in it)")
        what = "has no model.safetensors, only pickles, which can run any code"
        require(trust, f"{where}: {what}; if you trust them, --trust-remote-code")
    why = f"{REFUSED.get(config.model_type)}; docs/models.md lists what works"
    require(config.model_type not in REFUSED, f"{where}: {why}")
    kind = getattr(config, "quantization_config", None)
    what = "its weights are quantised, so they cannot be trained; use the model before quantisation"
    require(not kind, f"{where}: {what}")
    check_generation(model, config)
    special = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
    for end in {*find_ends(model, config)} - special:
        what = f"names token {end} as EOS, which is {tokenizer.decode([end])!r} to its tokenizer"
        hint = "responses would end there; correct eos_token_id in its generation_config.json"
        require(end >= len(tokenizer), f"{where}: its configuration {what}: {hint}")
    return config, tokenizer


def find_generation(model: str, config):
    """Its generation settings, from generation_config.json or, without that, config.json."""
    from transformers import GenerationConfig

    try:
        return GenerationConfig.from_pretrained(model)
    except OSError:  # there is no such file
        return GenerationConfig.from_model_config(config)


def find_ends(model: str, config) -> list[int]:
    """The EOS tokens that a model's files name: at these vLLM ends a response."""
    ends = find_generation(model, config).eos_token_id
    ends = ends if isinstance(ends, list) else [ends]
    return [end for end in ends if end is not None]


def check_stop(stop: str, tokenizer) -> None:
    """Raises UsageError for a stop string that no text has, since decoding drops it."""
    added = tokenizer.added_tokens_decoder.values()
    is_special = stop in (token.content for token in added if token.special)
    what = f"--stop {stop}: is a special token, which decoding drops"
    require(not is_special, f"{what}; add it to eos_token_id in generation_config.json")


def check_generation(model: str, config) -> None:
    """Raises UsageError for generation settings that transformers would later refuse to save, when
    hours of work are done. (`allow_sampling` mends sampling settings without do_sample.)"""
    try:
        settings = find_generation(model, config)
        allow_sampling(settings)
        settings.validate(strict=True)
    except ValueError as error:
        reason = " ".join(str(error).split())[:300]
        what = f"--model {model}: transformers cannot save its generation settings ({reason})"
        raise UsageError(f"{what}: correct generation_config.json, or config.json") from None


def allow_sampling(settings) -> None:
    """Sets do_sample where transformers would load the settings without it, but not save them."""
    try:
        settings.validate(strict=True)
    except ValueError:
        settings.do_sample = True


def check_weights(model: str, report: dict) -> None:
    """Raises UsageError where weights are missing, for which transformers takes random numbers.
    `report`: the loading info of from_pretrained."""
    missing = sorted(report["missing_keys"])
    what = f"weights are missing: {len(missing)} ({', '.join(missing)[:100]})"
    others = ", ".join(sorted(report["unexpected_keys"]))[:100]
    hint = f"it has others ({others})" if others else "the download or copy is not complete"
    require(not missing, f"--model {model}: {what}; {hint}")
