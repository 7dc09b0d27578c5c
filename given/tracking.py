"""Logging to Weights & Biases (--track)."""

import importlib.util
import os
import uuid

from common import UsageError, require
from common.checkpoints import read_json, write_json


def check() -> None:
    """Raises UsageError where a run could not be tracked."""
    has_wandb = importlib.util.find_spec("wandb")
    require(has_wandb, "--track needs Weights & Biases: .venv/bin/pip install wandb")
    import wandb

    is_online = os.environ.get("WANDB_MODE", "online") == "online"
    hint = "`.venv/bin/wandb login`, or WANDB_MODE=offline before the command"
    try:
        has_key = not is_online or wandb.login(prompt=False)
    except Exception as error:  # of any kind: a wrong key, no network, an old version
        raise UsageError(f"--track: {type(error).__name__} ({error}): {hint}") from None
    require(has_key, f"--track: not logged in to Weights & Biases: {hint}")


def start(folder: str, settings: dict) -> None:
    """Starts logging, under an id that the folder keeps, so that a resumed run continues it."""
    import wandb

    path = os.path.join(folder, "wandb.json")
    known = read_json(path) or {"id": uuid.uuid4().hex[:12]}
    write_json(path, known)
    name = os.path.basename(os.path.normpath(folder))
    options = {"config": settings, "dir": folder, "resume": "allow", "name": name}
    wandb.init(project="vineppo-in-a-file", **known, **options)
