"""The folders that a run reads and writes: do they exist, and does no other run use them?"""

import atexit
import errno
import fcntl
import glob
import hashlib
import json
import os
import socket
import tempfile

import torch.distributed as dist

from common import UsageError, ranks, require
from common.checkpoints import digest_files


def claim(folder: str, resume: str):
    """The open file that keeps other processes out of the folder until this one ends. Raises
    UsageError where another process uses the folder, or it cannot be written to; where it holds a
    run and `resume` is "no", or holds none and `resume` is "auto"."""
    what, path = f"--output-dir {folder}", os.path.join(folder, "lock")
    require("://" not in folder, f"{what}: is an address; name a folder of this machine")
    try:
        is_new = not os.path.lexists(folder)
        os.makedirs(folder, exist_ok=True)
        file = open(path, "w")  # noqa: SIM115
    except OSError as error:
        raise UsageError(f"{what}: cannot be written to ({error.strerror})") from None
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        is_taken = error.errno in (errno.EACCES, errno.EAGAIN)
        require(not is_taken, f"{what}: another process runs in it; name another folder")
        ranks.say(f"note: {folder} cannot be locked ({error.strerror}): start only one run in it")
    if is_new:
        atexit.register(leave, folder)
    has_settings = os.path.exists(os.path.join(folder, "args.json"))
    has_run = has_settings or glob.glob(f"{glob.escape(folder)}/checkpoints/*")
    hint = "continue it with --resume auto, or name another --output-dir"
    require(resume == "auto" or not has_run, f"{folder} already holds a run: {hint}")
    what = f"--resume auto: no run to resume in {folder}"
    require(resume == "no" or has_settings, what)
    return file


def check_output(path: str) -> None:
    """Raises UsageError for a file that cannot be written: now, not after hours of work."""
    require(not os.path.isdir(path), f"--output {path}: is a folder; name a file in it")
    try:
        os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
        open(path + ".tmp", "w").close()
        os.remove(path + ".tmp")
    except OSError as error:
        raise UsageError(f"--output {path}: cannot be written ({error.strerror})") from None


def leave(folder: str) -> None:
    """Removes the folder where a run was refused before it wrote anything."""
    if os.path.isdir(folder) and os.listdir(folder) == ["lock"]:
        os.remove(os.path.join(folder, "lock"))
        os.rmdir(folder)


def check_shared(folder: str) -> None:
    """Raises UsageError where a rank does not see what rank 0 writes to the folder, or its disk has
    no symbolic links (which hf and best are)."""

    def probe() -> tuple[str, str]:  # the file's name, what is wrong with a link to it
        path = tempfile.mkstemp(dir=folder)[1]
        try:
            os.symlink(path, f"{path}.link")
            os.remove(f"{path}.link")
        except OSError as error:
            return os.path.basename(path), f"{error.strerror}"
        return os.path.basename(path), ""

    name, wrong = ranks.from_main(probe)
    path = os.path.join(folder, name)  # as this rank names it
    blind = ranks.gather([] if os.path.exists(path) else [socket.gethostname()])
    if ranks.is_main():
        os.remove(path)
    what = "cannot see what rank 0 writes there: name a folder that all nodes share"
    require(not blind, f"--output-dir {folder}: {', '.join(sorted(set(blind)))} {what}")
    hint = "name a folder on another disk, and copy it after the run"
    require(not wrong, f"--output-dir {folder}: its disk has no symbolic links ({wrong}); {hint}")


# The names of files in a folder itself: folders in it may hold a run of ours.
MODEL_FILES = r"[^/]+\.(?:safetensors|bin|json|jinja)"
DATA_FILES = r"(?:sft|train|validation)\.(?:jsonl|parquet)"


def fingerprint(folder: str, wanted: str) -> str:
    """16 hexadecimal digits that change when files with `wanted` names in the folder do; "" where
    there is no such file. Raises UsageError where only some ranks have the folder."""
    blind = ranks.gather([] if os.path.isdir(folder) else [socket.gethostname()])
    nowhere = len(blind) == dist.get_world_size()
    require(nowhere or not blind, f"{folder}: is missing on {', '.join(sorted(set(blind)))}")
    digests = {} if nowhere else digest_files(folder, wanted)
    return hashlib.sha256(json.dumps(digests).encode()).hexdigest()[:16] if digests else ""
