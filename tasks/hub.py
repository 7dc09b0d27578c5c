"""Rows from the Hugging Face hub: `datasets` downloads them on the first call, to its cache."""

from common import UsageError, require
from tasks.jsonl import check_row


def read_hub(
    name: str,
    config: str | None,
    split: str,
    fields: tuple[str, ...],
    others: tuple[str, ...],
    what: str,
    hint: str,
) -> list[dict]:
    """Rows as `read_jsonl` gives them. Where they cannot be loaded, raises UsageError, which begins
    with `what` and ends with the `hint`."""
    from datasets import load_dataset  # seconds

    try:
        loaded = load_dataset(name, config, split=split)
    except Exception as error:  # of any kind: of the network, of the hub, of the files
        reason = " ".join(str(error).split())[:200]
        failure = f"could not be loaded from the hub ({reason})"
        raise UsageError(f"{what}: {name}, split {split}, {failure}: {hint}") from None
    require(len(loaded), f"{what}: {name}, split {split}, is empty")
    place = "/".join(part for part in (name, config, split) if part)
    return [check_row(row, fields, others, f"{place}:{i}") for i, row in enumerate(loaded, 1)]
