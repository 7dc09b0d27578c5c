"""The machine of a run: how the processes were launched, whether PyTorch can use the GPU."""

import os
import shutil
import subprocess

import torch
from tqdm import tqdm

from common import require


def check_launch() -> None:
    """Raises UsageError where several processes were started, but not by torchrun."""
    if "RANK" in os.environ:
        names = ("LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        missing = ", ".join(name for name in names if name not in os.environ)
        hint = "torchrun sets all of them; for one process, unset RANK"
        require(not missing, f"RANK is set, but not {missing}: {hint}")
    else:
        for name in ("SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK"):
            number = os.environ.get(name, "0")
            hint = "start one torchrun per node, which starts the ranks (docs/scale.md); for "
            hint += f"separate runs, unset {name}"
            what = f"{name} is {number}: each of these processes would train alone"
            require(number == "0", f"{what}; {hint}")


def check_that_there_is_none() -> None:
    """Raises UsageError for a GPU that the driver knows and PyTorch cannot use: the run would take
    weeks on the CPU. (Setting CUDA_VISIBLE_DEVICES to nothing or -1 asks for it.)"""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1") or not shutil.which(query[0]):
        return
    found = subprocess.run(query, capture_output=True, text=True)
    driver = "".join(found.stdout.split()[:1])
    cuda = f"is for CUDA {torch.version.cuda}" if torch.version.cuda else "is a build for CPUs"
    require(
        found.returncode or not driver,
        f"there is a GPU (driver {driver}) that PyTorch {torch.__version__} cannot use: it {cuda}. "
        "To use the GPU, update its driver to 580 or newer (for CUDA 13), then `rm -r .venv; make "
        "install`. To use the CPU, `rm -r .venv; CUDA_VISIBLE_DEVICES= make install`, and put "
        "CUDA_VISIBLE_DEVICES= before each command",
    )


def say_how_threads_wait() -> None:
    """On a CPU waiting threads spin, which is fast only where no other work needs the cores."""
    several = not torch.cuda.is_available() and torch.get_num_threads() > 1
    if several and not os.environ.keys() & {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"}:
        hint = "put GOMP_SPINCOUNT=1000 before the command"
        tqdm.write(f"note: if this machine does other work too, {hint}")
