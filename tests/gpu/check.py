"""On one GPU or more: everything that a CPU cannot show. `make gpu-check`, about ten minutes.

MODEL=FOLDER make gpu-check takes a real checkpoint through vineppo.py too. Tables are printed and
kept in runs/gpu-check.md: paste them into docs/gpu.md. Where a check fails, send that file and
runs/gpu-check.log.
"""

import os
import subprocess
import sys

import pytest
import torch

from common.run import MAX_SAMPLER_GAP as LIMITS
from tests.conftest import ROOT, SMALL, command, quiet_environment, read_jsonl
from tests.test_runs import BASELINES
from tests.test_sampler import check_parity

pytestmark = pytest.mark.gpu
GPUS = torch.cuda.device_count()
FOLDER = os.path.join(ROOT, "runs")
REPORT, LOG = (os.path.join(FOLDER, f"gpu-check.{end}") for end in ("md", "log"))
SCRIPTS = ["vineppo.py", "ppo.py", "grpo.py", "rloo.py", "restem.py", "dpo_pos.py"]


def report(text: str) -> None:
    print(text, flush=True)
    with open(REPORT, "a") as file:
        file.write(text + "\n")


def call(*arguments: str, ranks: int = 1) -> str:
    """What it prints; all of its output goes to the log."""
    words, environment = command(*arguments, ranks=ranks), quiet_environment(ranks)
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True)
    with open(LOG, "a") as file:
        file.write(f"$ {' '.join(arguments)}\n{done.stdout}\n{done.stderr}\n")
    assert done.returncode == 0, f"{' '.join(arguments)}: send {REPORT} and {LOG}"
    return done.stdout


def keep_table(output: str) -> None:
    report("\n" + "\n".join(line for line in output.splitlines() if line.startswith("|")))


@pytest.fixture(scope="module", autouse=True)
def start_report():
    os.makedirs(FOLDER, exist_ok=True)
    for path in (REPORT, LOG):
        open(path, "w").close()
    query = "--query-gpu=name,driver_version,memory.total"
    found = subprocess.check_output(["nvidia-smi", query, "--format=csv,noheader"], text=True)
    versions = f"PyTorch {torch.__version__}, CUDA {torch.version.cuda}"
    report(f"{found.strip()}\n\n{versions}, Python {sys.version.split()[0]}")
    assert GPUS, f"nvidia-smi sees a GPU and PyTorch none: {versions}"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A third of the embedded task's SFT, in bfloat16."""
    folder = tmp_path_factory.mktemp("sft")
    call("sft.py", "--num-epochs", "0.2", "--output-dir", str(folder))
    return str(folder / "hf")


def test_the_trainer_computes_what_it_should_in_the_memory_of_the_plan():
    keep_table(call("-m", "tests.gpu.trainer"))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_engine_sleeps_wakes_and_agrees(dtype):
    keep_table(call("-m", "tests.gpu.engine", "--dtype", dtype))


@pytest.mark.parametrize(
    "options",
    [
        ["--tied", "--dtype", "bfloat16", "--zero-stage", "2"],
        ["--dtype", "bfloat16"],
        ["--tied", "--dtype", "float32"],
        ["--dtype", "float32", "--zero-stage", "2"],
    ],
)
def test_sampler_and_trainer_agree_before_and_after_updates(options):
    dtype = options[options.index("--dtype") + 1]
    check_parity(*options, ranks=min(2, GPUS), limit=LIMITS[dtype])


@pytest.mark.parametrize("script", SCRIPTS)
def test_two_iterations_of(script, checkpoint, tmp_path):
    options = ["--model", checkpoint, "--output-dir", str(tmp_path / "run")]
    options += ["--eval-problems", "10", "--eval-rounds", "2", "--minibatch-size", "8"]
    options += BASELINES.get(script, [*SMALL[:4], "--num-iterations", "2"])
    call(script, *options, ranks=GPUS)
    lines = read_jsonl(tmp_path / "run/metrics.jsonl")
    assert all(line.get("policy/sampler_gap", 0.0) < LIMITS["bfloat16"] for line in lines)
    phases = {name[5:]: x for name, x in lines[-1].items() if name.startswith("time/")}
    shares = ", ".join(f"{name} {x:.2f}" for name, x in phases.items())
    report(f"\n{script}, {GPUS} GPUs, {len(lines)} iterations; seconds of the last: {shares}")


@pytest.mark.skipif("MODEL" not in os.environ, reason="no MODEL=FOLDER given")
def test_two_iterations_with_a_real_model(tmp_path):
    lengths = ["--max-model-len", "512", "--max-response-len", "256", "--k", "3"]
    options = [*SMALL, *lengths, "--num-iterations", "2", "--learning-rate", "1e-6"]
    options += ["--model", os.environ["MODEL"], "--output-dir", str(tmp_path / "run")]
    call("vineppo.py", *options, ranks=GPUS)
    for line in read_jsonl(tmp_path / "run/metrics.jsonl"):
        speed = line["tokens/rollouts"] / line["time/rollouts"]
        report(
            f"\n{os.environ['MODEL']}: gap {line['policy/sampler_gap']:.2g}, {speed:.0f} tokens/s"
        )


@pytest.mark.skipif(GPUS < 2, reason="one GPU: no rank can be late")
def test_a_late_rank_ends_nothing():
    """The last rank comes 20 seconds late, three times, once for NCCL."""
    output = call("-m", "tests.late", "--seconds", "20", ranks=GPUS)
    assert output.strip().endswith("together")
