"""A folder, or a name on the hub, in place of --model: can it be used?"""

import glob
import os

from common import UsageError, require

REFUSED = {  # model types that vLLM 0.32.0 cannot sample from as they are trained
    "bloom": "vLLM takes no new weights for its head",
    "gpt_bigcode": "vLLM's code for it does not know its shared keys and values",
    "gpt_oss": "vLLM's experts of this model are wrong once they are given new weights",
    "mpt": "vLLM supports it no longer",
}


def load(model: str, trust: bool):
    """(config, tokenizer) of the checkpoint. Raises UsageError unless `model` is a checkpoint
    folder, or the name of one on the hub, whose weights can be trained; with code of its own, or
    weights that are pickles (which run code when they are read), only where that is trusted."""
    from safetensors import safe_open
    from transformers import AutoConfig, AutoTokenizer  # seconds
    from transformers.utils import cached_file

    where = f"--model {model}"
    require(glob.escape(model) == model, f"{where}: vLLM finds no files in a path with [, ] or *")
    is_hub_name = model.count("/") == 1 and not model.startswith((".", "/", "~", "runs/"))
    hint = "; `python sft.py` makes it" if model == "runs/sft/hf" else ""
    require(os.path.isdir(model) or is_hub_name, f"{where}: no such folder{hint}")
    folder = glob.escape(model)
    try:
        config = AutoConfig.from_pretrained(model, trust_remote_code=trust)
        tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=trust)
        for weights in glob.glob(f"{folder}/*.safetensors"):
            safe_open(weights, "pt")  # reads the header: a file that was cut off fails here
        names = ("model.safetensors.index.json", "model.safetensors")  # of the hub: downloads one
        missing = {"_raise_exceptions_for_missing_entries": False}
        has_safetensors = any(cached_file(model, name, **missing) for name in names)
    except Exception as error:  # transformers raises anything, KeyError included
        reason = " ".join(str(error).split())[:300]
        needs_trust = "trust_remote_code" in str(error)
        hint = "runs code of its own; read it, then --trust-remote-code"
        require(not needs_trust, f"{where}: {hint}")
        what = "not a checkpoint" if os.path.isdir(model) else "no such folder, nor on the hub"
        raise UsageError(f"{where}: {what} ({reason})") from None
    require(tokenizer.eos_token_id is not None, f"{where}: its tokenizer has no EOS token")
    num_tokens, rows = tokenizer.vocab_size, getattr(config, "vocab_size", tokenizer.vocab_size)
    sizes = f"its tokenizer has {num_tokens} tokens, its embeddings {rows} rows"
    require(num_tokens <= rows, f"{where}: {sizes}: it is another model's tokenizer")
    added = max(tokenizer.eos_token_id, tokenizer.bos_token_id or 0)
    what = f"its tokenizer's EOS or BOS is token {added}, its embeddings have {rows} rows"
    require(added < rows, f"{where}: {what}: resize_token_embeddings, then save it")
    if not has_safetensors:
        has_pickles = is_hub_name or glob.glob(f"{folder}/*.bin")
        require(has_pickles, f"{where}: not a checkpoint (no model.safetensors in it)")
        what = "has no model.safetensors, only pickles, which can run code"
        require(trust, f"{where}: {what}; where you trust them: --trust-remote-code")
    why = f"{REFUSED.get(config.model_type)}; docs/models.md has what works"
    require(config.model_type not in REFUSED, f"{where}: {why}")
    kind = getattr(config, "quantization_config", None)
    what = "its weights are quantised, so they cannot be trained; take the model they were made of"
    require(not kind, f"{where}: {what}")
    check_generation(model)
    special = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
    for end in {*find_ends(model, config)} - special:
        what = f"names token {end} as EOS, which is {tokenizer.decode([end])!r} to its tokenizer"
        hint = "responses would end there; mend eos_token_id in its generation_config.json"
        require(end >= len(tokenizer), f"{where}: its configuration {what}: {hint}")
    return config, tokenizer


def find_ends(model: str, config) -> list[int]:
    """The EOS tokens that a model's files name, at which vLLM ends a response."""
    from transformers import GenerationConfig

    try:
        ends = GenerationConfig.from_pretrained(model).eos_token_id
    except OSError:  # there is no such file
        ends = config.get_text_config().eos_token_id
    ends = ends if isinstance(ends, list) else [ends]
    return [end for end in ends if end is not None]


def check_stop(stop: str, tokenizer) -> None:
    """Raises UsageError for a stop string that decoding leaves out of every text."""
    added = tokenizer.added_tokens_decoder.values()
    is_special = stop in (token.content for token in added if token.special)
    what = f"--stop {stop}: a special token, of which no text has a trace"
    require(not is_special, f"{what}; name it as an EOS in generation_config.json")


def check_generation(model: str) -> None:
    """Raises UsageError for generation settings that transformers would refuse to save, long after
    the run has begun. (Sampling settings without do_sample are evened out: `even_out`.)"""
    from transformers import GenerationConfig

    try:
        settings = GenerationConfig.from_pretrained(model)
        even_out(settings)
        settings.validate(strict=True)
    except OSError:
        return  # there is none
    except ValueError as error:
        reason = " ".join(str(error).split())[:300]
        what = f"--model {model}: its generation_config.json could not be saved again"
        raise UsageError(f"{what} ({reason}): mend or remove that file") from None


def even_out(settings) -> None:
    """A temperature without do_sample is what transformers reads with a warning, and does not
    save; who sets a temperature means to sample."""
    try:
        settings.validate(strict=True)
    except ValueError:
        settings.do_sample = True


def check_weights(model: str, report: dict) -> None:
    """Raises UsageError where transformers has put random numbers for what is missing.
    `report`: the loading info of from_pretrained."""
    missing = sorted(report["missing_keys"])
    what = f"{len(missing)} of its weights are missing ({', '.join(missing)[:100]})"
    others = ", ".join(sorted(report["unexpected_keys"]))[:100]
    hint = f"others are there ({others})" if others else "the download or copy is not complete"
    require(not missing, f"--model {model}: {what}; {hint}")
