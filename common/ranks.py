"""Many processes (ranks) as one: each works on its share of a list, then all get the whole."""

import ctypes
import functools
import hashlib
import os
import random
import signal
import sys
import warnings
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from tqdm import tqdm

from common import require
from given import machine

PR_SET_PDEATHSIG = 1
# How long a rank waits for a slow one: only rank 0 writes hf/, which may take more than DeepSpeed's
# ten minutes. A process that dies is noticed at once, a machine that loses power after this time.
PATIENCE = timedelta(hours=3)
ENVIRONMENT = {
    "DS_LOG_LEVEL": "error",
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_VERBOSITY": "error",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
}
ON_A_CPU = {
    "DS_ACCELERATOR": "cpu",
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64",  # at its default, 1,024, memory grows for hours
    "TORCH_COMPILE_DISABLE": "1",  # 15 s for one small function of vLLM
}


def set_up() -> tuple[int, int, torch.device]:
    """(rank, number of ranks, device). Without torchrun it sets the variables for one process."""
    if not dist.is_initialized():  # the first call
        machine.check_launch()
    if "RANK" not in os.environ:
        os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    else:  # if torchrun is killed, its ranks must end too, or they disturb the next start
        ctypes.CDLL("libc.so.6").prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    on_gpu = torch.cuda.is_available()
    if not on_gpu and not dist.is_initialized():
        machine.check_that_there_is_none()
    for name, value in (ENVIRONMENT if on_gpu else ENVIRONMENT | ON_A_CPU).items():
        os.environ.setdefault(name, value)
    sys.stdout.reconfigure(errors="backslashreplace")  # models write what terminals cannot show
    warnings.filterwarnings("ignore", category=FutureWarning)  # which engines give about each other
    local_rank, num_gpus = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
    device = torch.device("cuda", local_rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        what = f"local rank {local_rank} needs a GPU of its own, PyTorch sees {num_gpus} here"
        require(local_rank < num_gpus, f"{what}: see --nproc-per-node, CUDA_VISIBLE_DEVICES")
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        hook = sys.excepthook
        # Not bound to a device, as DeepSpeed's is: vLLM's new groups would need all ranks at once.
        backend, alone = "cpu:gloo,cuda:nccl" if on_gpu else "gloo", os.environ["WORLD_SIZE"] == "1"
        place = dict(store=dist.HashStore(), rank=0, world_size=1) if alone else {}  # needs no port
        dist.init_process_group(backend, timeout=PATIENCE, **place)
        sys.excepthook = hook  # torch's would put the rank before each line
    return dist.get_rank(), dist.get_world_size(), device


def is_main() -> bool:
    return os.environ.get("RANK", "0") == "0"


def say(text: str) -> None:
    """Prints it once, above the progress bar if there is one."""
    if is_main():
        tqdm.write(text)


def share(items: list, size: int = 1) -> list:
    """This rank's contiguous share (or the one that `size` ranks have together); the lengths of
    shares differ by one at most."""
    part, parts = dist.get_rank() // size, dist.get_world_size() // size
    return items[len(items) * part // parts : len(items) * (part + 1) // parts]


def gather(items: list) -> list:
    """The shares of all ranks in order, on every rank."""
    if dist.get_world_size() == 1:
        return items  # see add_up
    shares: list = [None] * dist.get_world_size()
    dist.all_gather_object(shares, items)
    return [item for part in shares for item in part]


def add_up(tensor: torch.Tensor) -> None:
    """In place, the sum of the ranks' tensors. A single process does nothing: gloo would copy large
    tensors in a thread with OpenMP threads of its own. There would be more threads than cores, so
    libgomp's would no longer spin, and all parallel work would take twice the time."""
    if dist.get_world_size() > 1:
        dist.all_reduce(tensor)


def shared_map(function: Callable, items: list) -> list:
    """[function(item) for item in items], of which each rank computes its share."""
    return gather([function(item) for item in share(items)])


def from_main(function: Callable):
    """What function() returns on rank 0, on every rank."""
    return gather([function()] if dist.get_rank() == 0 else [])[0]


# ---- draws ---------------------------------------------------------------------------------------


def seed_of(*parts: int | str) -> int:
    """A seed for one purpose, e.g. seed_of(seed, iteration, "rollouts")."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:7])


def draw(num_items: int, start: int, count: int, *seed: int | str) -> list[int]:
    """Items start ... start + count - 1 of an endless stream of shuffled epochs: no repeats inside
    an epoch, the same on every rank. A resumed run goes on where the stream was."""
    indices: list[int] = []
    while len(indices) < count:
        epoch, position = divmod(start + len(indices), num_items)
        order = shuffled(num_items, seed_of(*seed, epoch, "epoch"))
        indices += order[position : position + count - len(indices)]
    return indices


@functools.lru_cache(maxsize=4)  # an epoch that many draws ask for is shuffled once
def shuffled(num_items: int, seed: int) -> tuple[int, ...]:
    order = list(range(num_items))
    random.Random(seed).shuffle(order)
    return tuple(order)


def minibatches(num_items: int, size: int, *seed: int | str) -> list[list[int]]:
    """All items, shuffled, in lists of `size`; the same on every rank."""
    order = draw(num_items, 0, num_items, *seed)
    return [order[first : first + size] for first in range(0, num_items, size)]
