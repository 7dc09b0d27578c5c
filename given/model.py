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
    """(config, tokenizer) of a checkpoint folder, or of the name of one on the hub. Raises
    UsageError for one whose weights cannot be trained. Raises it too for code of the model's own,
    and for weights that are pickles (which run code when they are read), unless `trust`."""
    from safetensors import safe_open
    from transformers import AutoConfig, AutoTokenizer  # seconds
    from transformers.utils import cached_file

    where = f"--model {model}"
    require(glob.escape(model) == model, f"{where}: vLLM finds no files in a path with *, ? or [")
    is_hub_name = model.count("/") == 1 and not model.startswith((".", "/", "~", "runs/"))
    hint = "; `python sft.py` makes it" if model == "runs/sft/hf" else ""
    require(os.path.isdir(model) or is_hub_name, f"{where}: no such folder{hint}")
    try:
        config = AutoConfig.from_pretrained(model, trust_remote_code=trust)
        # mistral_format: Mistral's newer files have a tokenizer of another library beside this one
        options = {"trust_remote_code": trust, "mistral_format": False}
        tokenizer = AutoTokenizer.from_pretrained(model, **options)
        for weights in glob.glob(f"{model}/*.safetensors"):
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
    num_tokens, rows = tokenizer.vocab_size, config.get_text_config().vocab_size
    sizes = f"its tokenizer has {num_tokens} tokens, its embeddings {rows} rows"
    require(num_tokens <= rows, f"{where}: {sizes}: it is another model's tokenizer")
    added = max(tokenizer.eos_token_id, tokenizer.bos_token_id or 0)
    what = f"its tokenizer's EOS or BOS is token {added}, its embeddings have {rows} rows"
    require(added < rows, f"{where}: {what}: resize_token_embeddings, then save it")
    if not has_safetensors:
        has_pickles = is_hub_name or glob.glob(f"{model}/*.bin")
        require(has_pickles, f"{where}: not a checkpoint (no model.safetensors in it)")
        what = "has no model.safetensors, only pickles, which can run code"
        require(trust, f"{where}: {what}; where you trust them: --trust-remote-code")
    why = f"{REFUSED.get(config.model_type)}; docs/models.md has what works"
    require(config.model_type not in REFUSED, f"{where}: {why}")
    kind = getattr(config, "quantization_config", None)
    what = "its weights are quantised, so they cannot be trained; take the model they were made of"
    require(not kind, f"{where}: {what}")
    check_generation(model, config)
    special = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
    for end in {*find_ends(model, config)} - special:
        what = f"names token {end} as EOS, which is {tokenizer.decode([end])!r} to its tokenizer"
        hint = "responses would end there; mend eos_token_id in its generation_config.json"
        require(end >= len(tokenizer), f"{where}: its configuration {what}: {hint}")
    return config, tokenizer


def find_generation(model: str, config):
    """Its generation settings: those of generation_config.json or, without it, of config.json."""
    from transformers import GenerationConfig

    try:
        return GenerationConfig.from_pretrained(model)
    except OSError:  # there is no such file
        return GenerationConfig.from_model_config(config)


def find_ends(model: str, config) -> list[int]:
    """The EOS tokens that a model's files name, at which vLLM ends a response."""
    ends = find_generation(model, config).eos_token_id
    ends = ends if isinstance(ends, list) else [ends]
    return [end for end in ends if end is not None]


def check_stop(stop: str, tokenizer) -> None:
    """Raises UsageError for a stop string that decoding leaves out of every text."""
    added = tokenizer.added_tokens_decoder.values()
    is_special = stop in (token.content for token in added if token.special)
    what = f"--stop {stop}: a special token, which decoding leaves out of a text"
    require(not is_special, f"{what}; name it as an EOS in generation_config.json")


def check_generation(model: str, config) -> None:
    """Raises UsageError for generation settings that transformers would refuse to save, long after
    the run has begun. (Sampling settings without do_sample are mended: `allow_sampling`.)"""
    try:
        settings = find_generation(model, config)
        allow_sampling(settings)
        settings.validate(strict=True)
    except ValueError as error:
        reason = " ".join(str(error).split())[:300]
        what = f"--model {model}: its generation settings could not be saved again ({reason})"
        raise UsageError(f"{what}: mend generation_config.json, or config.json") from None


def allow_sampling(settings) -> None:
    """transformers reads a temperature without do_sample, with a warning, but does not save it."""
    try:
        settings.validate(strict=True)
    except ValueError:
        settings.do_sample = True


def check_weights(model: str, report: dict) -> None:
    """Raises UsageError where transformers has put random numbers for what is missing.
    `report`: the loading info of from_pretrained."""
    missing = sorted(report["missing_keys"])
    what = f"weights are missing: {len(missing)} ({', '.join(missing)[:100]})"
    others = ", ".join(sorted(report["unexpected_keys"]))[:100]
    hint = f"others are there ({others})" if others else "the download or copy is not complete"
    require(not missing, f"--model {model}: {what}; {hint}")
