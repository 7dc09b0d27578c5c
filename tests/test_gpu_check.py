"""Parts of `make gpu-check` that need no GPU, and messages for GPUs that cannot be used."""

import os
import stat
import subprocess
import sys
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from common import UsageError, ranks, sampling
from given import machine
from tests.conftest import BIN, ROOT, call, quiet_environment
from tests.gpu import trainer

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "check", [trainer.check_head, trainer.check_padding, trainer.check_lending]
)
def test_the_trainer_s_checks_hold_here(check, dtype):
    rows = check(CPU, dtype)
    assert rows and all(row.is_as_expected for row in rows), rows


@pytest.mark.soak
def test_the_whole_table_of_the_trainer():
    lines = call("-m", "tests.gpu.trainer").stdout.splitlines()
    assert sum(line.startswith("| ") for line in lines) == 21
    assert not any("not as expected" in line for line in lines)


@pytest.mark.soak
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_table_of_the_engine(dtype):
    lines = call("-m", "tests.gpu.engine", "--dtype", dtype).stdout.splitlines()
    assert sum(line.startswith("| ") for line in lines) == 8
    assert not any("not as expected" in line for line in lines)


def test_a_machine_without_a_gpu_gets_one_line(tmp_path):
    environment = quiet_environment() | {"PATH": str(tmp_path)}
    words = [sys.executable, "-m", "tests.gpu"]
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr == ""
    assert done.stdout.startswith("gpu-check: no GPU here") and done.stdout.count("\n") == 1


@pytest.mark.slow
def test_on_a_gpu_its_tests_are_found():
    words = ["-m", "pytest", "-q", "--collect-only", "-m", "gpu", "tests/gpu/check.py"]
    found = call(*words).stdout
    for name in ("sleeps", "memory_of_the_plan", "two_iterations_of[dpo_pos.py]", "late_rank"):
        assert name in found


# ---- machines that will not do -------------------------------------------------------------------


@pytest.fixture
def nvidia_smi(tmp_path, monkeypatch):
    """Puts a fake nvidia-smi first on the path: it prints a driver's version, or fails."""

    def install(output: str, status: int = 0) -> None:
        file = tmp_path / "nvidia-smi"
        file.write_text(f"#!/bin/sh\nprintf '{output}'\nexit {status}\n")
        file.chmod(file.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    return install


def test_a_gpu_that_pytorch_cannot_use_is_an_error(nvidia_smi, monkeypatch):
    nvidia_smi("570.86.10\\n570.86.10\\n")
    for cuda, what in ((None, "it is a build for CPUs"), ("13.0", "it is for CUDA 13.0")):
        monkeypatch.setattr(torch.version, "cuda", cuda)
        with pytest.raises(UsageError, match=rf"GPU \(driver 570.86.10\) that PyTorch .*{what}"):
            machine.check_that_there_is_none()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")  # as Slurm does
    with pytest.raises(UsageError):
        machine.check_that_there_is_none()
    for hidden in ("", "-1"):  # the CPU is wanted
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        machine.check_that_there_is_none()


@pytest.mark.slow
def test_more_ranks_than_gpus_is_an_error():
    code = "import torch; from common import ranks; torch.cuda.is_available = lambda: True\n"
    code += "torch.cuda.device_count = lambda: 2; ranks.set_up()"
    environment = quiet_environment() | {"RANK": "5", "LOCAL_RANK": "5", "WORLD_SIZE": "8"}
    environment |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    message = "error: local rank 5 needs a GPU of its own, PyTorch sees 2 here: see --nproc-per"
    assert done.returncode == 1 and done.stderr.startswith(message)


@pytest.mark.parametrize(("output", "status"), [("", 0), ("no driver", 9)])
def test_no_gpu_is_no_error(nvidia_smi, output, status):
    nvidia_smi(output, status)
    machine.check_that_there_is_none()


@pytest.mark.parametrize(
    ("driver", "message"),
    [
        (
            "570.86.10",
            "install: the GPU's driver is 570.86.10, PyTorch's CUDA 13 needs 580 or newer",
        ),
        ("580.65.06", "install: no C compiler"),
    ],
)
def test_a_driver_that_is_too_old_is_named_before_anything_is_installed(
    nvidia_smi, driver, message
):
    nvidia_smi(f"{driver}\\n")
    code = "import shutil; from install import install; which = shutil.which\n"
    code += "shutil.which = lambda name: name == 'nvidia-smi' and which(name)\ninstall.main()"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.startswith(message)


def test_flashinfer_is_not_compiled_at_the_start():
    assert sampling and os.environ["VLLM_USE_FLASHINFER_SAMPLER"] == "0"


# ---- ranks that are late, or dead ----------------------------------------------------------------


def test_ranks_wait_for_hours():
    ranks.set_up()
    backend = dist.group.WORLD._get_backend(CPU)
    assert timedelta(hours=1) < ranks.PATIENCE < timedelta(hours=12)
    assert backend.options._timeout == ranks.PATIENCE
    assert dist.group.WORLD.bound_device_id is None


def call_late(*arguments: str) -> subprocess.CompletedProcess:
    words = [f"{BIN}/torchrun", "--standalone", "--nproc-per-node", "2", "-m", "tests.late"]
    environment = quiet_environment(2)
    words += arguments
    return subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True)


@pytest.mark.soak
def test_a_dead_rank_is_named():
    done = call_late("--dead")
    assert done.returncode != 0 and "together" not in done.stdout
    assert "rank      : 1 (local_rank: 1)" in done.stderr.split("Root Cause")[1]
    assert "Signal 9 (SIGKILL)" in done.stderr


@pytest.mark.soak
def test_a_late_rank_ends_nothing():
    """The last rank comes 20 seconds late, three times; with 5 seconds of patience that ends it."""
    done = call_late("--seconds", "20")
    assert done.returncode == 0 and done.stdout.endswith("together\n"), done.stderr[-3000:]
    done = call_late("--seconds", "20", "--patience", "5")
    assert done.returncode != 0 and "together" not in done.stdout
    assert "imed out" in done.stderr
