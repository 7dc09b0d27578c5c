"""The long trials (`make soak`); their last results are in docs/reliability.md."""

import filecmp
import json
import os
import re
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import time
import venv

import pytest
import safetensors.torch
import torch
from transformers import AutoModelForCausalLM

from common import data
from tasks import chain
from tests.conftest import (
    BIN,
    ROOT,
    SMALL,
    call,
    copy_of_the_project,
    quiet_environment,
    read_jsonl,
    start_run,
    timeless,
)
from tests.test_replays import SCRIPTS, check_same
from tests.test_runs import BASELINES, FAST, HANG, check_same_run, end_at
from tests.test_sampler import check_parity

pytestmark = pytest.mark.soak
DATA = os.path.join(ROOT, "../shared/data")


@pytest.fixture(scope="session")
def embedded(tmp_path_factory):
    """The embedded checkpoint with sft.py's defaults, on two ranks as in the demo."""
    folder = tmp_path_factory.mktemp("embedded")
    call("sft.py", "--output-dir", str(folder), ranks=2)
    return folder / "hf"


def pass_at_1(model, output) -> float:
    call("evaluate.py", "--model", str(model), "--output", str(output), ranks=2)
    with open(output) as file:
        return json.load(file)["pass@1"]


def test_sft_checkpoint_is_in_its_range(embedded, tmp_path):
    """The teacher's entropy is 0.704 nats a token. Where a loss of 0.72 remained, facts that it
    always gets right were not learnt yet, and the same training from there ended at 0.4."""
    found = pass_at_1(embedded, tmp_path / "result.json")
    loss = read_jsonl(f"{embedded.parent}/metrics.jsonl")[-1]["eval/loss"]
    print(f"\nSFT: pass@1 {found:.3f}, loss {loss:.4f}")
    assert 0.08 <= found <= 0.15 and loss < 0.712


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_vineppo_learns(embedded, tmp_path, seed):
    folder = str(tmp_path / "run")
    model = str(embedded)
    call("vineppo.py", "--seed", str(seed), "--model", model, "--output-dir", folder, ranks=2)
    lines = read_jsonl(f"{folder}/metrics.jsonl")
    found = pass_at_1(f"{folder}/hf", tmp_path / "result.json")
    seconds = sum(line["time/iteration"] for line in lines)
    gap = max(line["policy/sampler_gap"] for line in lines)
    print(f"\nseed {seed}: pass@1 {found:.3f}, {seconds:.0f} s, sampler gap at most {gap:.1e}")
    assert found >= 0.80 and gap < 1e-4


def test_every_planted_mistake_is_found():
    result = call("-m", "tests.mutants")
    print("\n" + result.stdout)
    assert re.search(r"^killed (\d+) of \1$", result.stdout, re.MULTILINE)


def test_killed_at_random_moments_they_resume_bit_for_bit(sft_model, tmp_path):
    """Each of the seven scripts on one rank and on two, in any phase; every other try is
    killed once more."""
    result = call("-m", "tests.kills", "--model", sft_model, "--folder", str(tmp_path), *TRIES)
    print("\n" + result.stdout)
    assert result.stdout.endswith("14 tries, 14 the same, 0 not\n")


TRIES = ["--tries", "14", "--seed", "2"]


def wait_for(path, process) -> None:
    deadline = time.time() + HANG
    while not os.path.exists(path) or os.path.getsize(path) == 0:
        assert process.poll() is None and time.time() < deadline, process.communicate()[0][-3000:]
        time.sleep(0.02)


def terminate(arguments, path, ranks) -> tuple[int, str]:
    """SIGTERM as soon as `path` is there; the exit status and the output."""
    process = start_run(arguments, ranks)
    wait_for(path, process)
    process.terminate()
    output, _ = process.communicate(timeout=HANG)
    return process.returncode, output


@pytest.mark.parametrize("flags", [[], ["--zero-stage", "3", "--gradient-checkpointing"]])
def test_terminated_on_two_ranks_it_resumes_bit_for_bit(flags, sft_model, tmp_path):
    arguments = ["vineppo.py", *FAST, *flags, "--model", sft_model, "--output-dir"]
    call(*arguments, str(tmp_path / "whole"), ranks=2)
    arguments.append(str(tmp_path / "run"))
    _, output = terminate(arguments, tmp_path / "run/metrics.jsonl", ranks=2)
    assert "is written; continue with --resume auto" in output
    call(*arguments, "--resume", "auto", ranks=2)
    check_same_run(tmp_path / "run", tmp_path / "whole")


def test_a_sigterm_that_one_rank_gets_ends_all_of_them(sft_model, tmp_path):
    arguments = ["vineppo.py", *FAST, "--model", sft_model, "--output-dir", str(tmp_path / "run")]
    status, output = end_at("SIGTERM grade 1", arguments, ranks=2)
    assert status != 0 and "SIGTERM: checkpoint 1 is written; continue with --resume" in output
    assert len(read_jsonl(tmp_path / "run/metrics.jsonl")) == 1


def test_the_seed_decides_the_initial_weights(tmp_path):
    """After a tiny step the weights are still those that were drawn."""
    options = ["--num-epochs", "0.0008", "--learning-rate", "1e-12", "--eval-every", "0"]
    call("sft.py", "--seed", "2", *options, "--output-dir", str(tmp_path))
    torch.manual_seed(2)
    config = chain.make_model_config(chain.make_tokenizer())
    drawn = AutoModelForCausalLM.from_config(config).state_dict()
    saved = safetensors.torch.load_file(tmp_path / "hf/model.safetensors")
    for name, weight in saved.items():
        torch.testing.assert_close(weight, drawn[name], rtol=0, atol=1e-7)


def test_memory_and_files_do_not_grow(sft_model, tmp_path):
    """200 iterations: the process as the system sees it, after each of them."""
    arguments = ["vineppo.py", *SMALL, "--num-iterations", "200", "--model", sft_model]
    arguments += ["--output-dir", str(tmp_path / "run")]
    with open(tmp_path / "log", "w") as log:
        process = start_run(arguments, 1, log)
    metrics, seen = tmp_path / "run/metrics.jsonl", []
    while process.poll() is None:
        done = metrics.read_text().count("\n") if metrics.exists() else 0
        if done > len(seen):
            with open(f"/proc/{process.pid}/status") as file:
                size = int(file.read().split("VmRSS:")[1].split()[0])
            seen.append((size, len(os.listdir(f"/proc/{process.pid}/fd"))))
        time.sleep(0.05)
    assert process.returncode == 0, (tmp_path / "log").read_text()[-3000:]
    assert len(seen) > 40  # a look may miss many on a busy machine
    before, after = (
        statistics.median(size for size, _ in part) for part in (seen[9:20], seen[-10:])
    )
    growth, files = after / before - 1, (seen[9][1], seen[-10][1])
    print(f"\n{before / 1e6:.3f} GB after 10 to 20 iterations, {after / 1e6:.3f} after 190 to 200")
    print(f"{growth:+.2%}; open files {files[0]} and {files[1]}")
    assert growth < 0.02 and files[1] <= files[0]


def test_samples_in_parts_go_on_behind_those_that_are_there(sft_model, tmp_path):
    """DPO-Positive, killed while it samples: two prompts a part, the second part is missing."""
    whole, run = tmp_path / "whole", tmp_path / "run"
    code = "import dpo_pos; from common import flags; dpo_pos.PART = 2\n"
    code += "dpo_pos.main(flags.parse(dpo_pos.Args))"
    arguments = ["-c", code, *BASELINES["dpo_pos.py"], "--model", sft_model, "--output-dir"]
    call(*arguments, str(whole))
    shutil.copytree(whole, run, symlinks=True)
    for name in ("hf", "best", "finished", "samples_0001.json", "metrics.jsonl"):
        os.remove(run / name)
    for name in os.listdir(run / "checkpoints"):
        shutil.rmtree(run / "checkpoints" / name)
    call(*arguments, str(run), "--resume", "auto")
    for name in ("samples_0000.json", "samples_0001.json"):
        assert (run / name).read_bytes() == (whole / name).read_bytes()
    check_same_run(run, whole)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can mount a small disk")
def test_a_full_disk_loses_nothing(sft_model, tmp_path):
    """A disk with room for one checkpoint and a half; then for all."""
    disk = tmp_path / "disk"
    disk.mkdir()
    arguments = ["vineppo.py", *FAST, "--model", sft_model, "--output-dir"]
    call(*arguments, str(tmp_path / "whole"))
    mount = ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(disk)]
    if subprocess.call(mount) != 0:
        pytest.skip("mount is not allowed here")
    try:
        arguments.append(str(disk / "run"))
        process = start_run(arguments, 1)  # it has room at its start, then somebody else needs it
        wait_for(disk / "run/checkpoints/iteration_000002/manifest.json", process)
        os.killpg(process.pid, signal.SIGSTOP)
        subprocess.check_call(["mount", "-o", "remount,size=10m", str(disk)])
        os.killpg(process.pid, signal.SIGCONT)
        output, _ = process.communicate(timeout=HANG)
        assert process.returncode == 1 and "error: checkpoint 4 could not be written" in output
        hint = "checkpoint 2 is intact: fix that (is the disk full?), then continue"
        assert hint in output
        result = call(*arguments, "--resume", "auto", fails=True)
        assert "GB needed (" in result.stderr  # said before the first iteration
        assert sorted(os.listdir(disk / "run/checkpoints")) == ["best_000002", "iteration_000002"]
        subprocess.check_call(["mount", "-o", "remount,size=64m", str(disk)])
        call(*arguments, "--resume", "auto")
        check_same_run(disk / "run", tmp_path / "whole")
    finally:
        subprocess.check_call(["umount", str(disk)])


def test_ranks_do_not_outlive_torchrun(sft_model, tmp_path):
    arguments = ["vineppo.py", *SMALL, "--num-iterations", "1000", "--model", sft_model]
    process = start_run([*arguments, "--output-dir", str(tmp_path / "run")], ranks=2)
    wait_for(tmp_path / "run/metrics.jsonl", process)
    process.kill()
    process.communicate(timeout=HANG)  # the ranks hold its output open
    assert str(tmp_path) not in subprocess.check_output(["ps", "-eo", "args"], text=True)


def test_two_runs_on_one_machine(sft_model, tmp_path):
    """torchrun --standalone and a script alone both find ports of their own."""
    arguments = ["vineppo.py", *SMALL, "--num-iterations", "1", "--model", sft_model]
    runs = [
        start_run([*arguments, "--output-dir", str(tmp_path / f"run{number}")], ranks)
        for number, ranks in enumerate((2, 2, 1, 1))
    ]
    outputs = [process.communicate()[0] for process in runs]
    assert [process.returncode for process in runs] == [0] * 4, outputs[0][-2000:]


def test_weights_that_are_trusted_pickles_are_evaluated(sft_model, tmp_path):
    folder = tmp_path / "pickles"
    shutil.copytree(sft_model, folder)
    weights = safetensors.torch.load_file(folder / "model.safetensors")
    torch.save(weights, folder / "pytorch_model.bin")
    os.remove(folder / "model.safetensors")
    arguments = ["--num-problems", "20", "--rounds", "2"]
    result = call("evaluate.py", "--model", str(folder), "--trust-remote-code", *arguments)
    same = call("evaluate.py", "--model", sft_model, *arguments)
    line = next(line for line in result.stdout.splitlines() if line.startswith("pass@1"))
    assert line in same.stdout


# ---- two hosts: two torchrun agents that meet on the loopback device -----------------------------


def start_on_two_hosts(arguments, folders=(ROOT, ROOT)) -> list[subprocess.Popen]:
    """Two ranks on each."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    meet = ["--nnodes", "2", "--nproc-per-node", "2", "--rdzv-backend", "c10d", "--rdzv-id", "1"]
    meet += ["--rdzv-endpoint", f"127.0.0.1:{port}", "--local-addr", "127.0.0.1"]
    return [
        subprocess.Popen(
            [f"{BIN}/torchrun", *meet, *arguments],
            cwd=folder,
            env={**quiet_environment(ranks=4), "PYTHONPATH": ROOT},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        for folder in folders
    ]


def test_four_ranks_on_two_hosts_make_the_gradients_of_one(recorded):
    folder, arguments = recorded
    options = ["--name", "two_hosts", "--micro-batch-tokens", "250"]
    agents = start_on_two_hosts(["-m", "tests.replay", *arguments, *options])
    outputs = [agent.communicate()[0] for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], outputs[0][-3000:]
    for script in SCRIPTS:
        check_same(folder / "two_hosts", folder / "recorded", script)


def test_a_dead_rank_ends_the_run_and_a_restart_resumes(sft_model, tmp_path):
    run = tmp_path / "run"
    arguments = [f"{ROOT}/vineppo.py", *FAST, "--save-every", "1", "--model", sft_model]
    arguments += ["--output-dir", str(run)]
    agents = start_on_two_hosts(arguments)
    wait_for(run / "checkpoints/iteration_000001/manifest.json", agents[0])
    children = subprocess.check_output(["pgrep", "-P", str(agents[1].pid)], text=True).split()
    start = time.time()
    os.kill(int(children[-1]), signal.SIGKILL)
    outputs = [agent.communicate(timeout=HANG)[0] for agent in agents]
    print(f"\nover {time.time() - start:.0f} s after the kill")
    assert all(agent.returncode != 0 for agent in agents)
    cause = f"Signal 9 (SIGKILL) received by PID {children[-1]}"
    (report,) = [text for text in outputs if cause in text]
    assert re.search(r"rank +: [0-3] \(local_rank: 1\)", report)
    agents = start_on_two_hosts([*arguments, "--resume", "auto"])
    outputs = [agent.communicate()[0] for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], outputs[0][-3000:]
    assert [line["iteration"] for line in read_jsonl(run / "metrics.jsonl")] == [1, 2, 3, 4]


def test_a_folder_that_is_not_shared_is_refused(sft_model, tmp_path):
    folders = tmp_path / "one", tmp_path / "other"
    for folder in folders:
        folder.mkdir()
    arguments = [f"{ROOT}/vineppo.py", *FAST, "--model", sft_model, "--output-dir", "run"]
    outputs = [agent.communicate()[0] for agent in start_on_two_hosts(arguments, folders)]
    assert any("error: --output-dir run: " in text for text in outputs), outputs[0][-3000:]
    assert any("name a folder that all nodes share" in text for text in outputs)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("script", ["ppo", "grpo", "rloo", "restem", "dpo_pos"])
def test_defaults_on_any_number_of_ranks(script, ranks, embedded, tmp_path):
    """The method also learns something: pass@1 on validation problems is above 0.13 at least once.
    (The SFT checkpoint's is 0.10; what each method reaches is in docs/results.md.) PPO takes
    seed 2: with seed 1 on two ranks, its policy once collapsed (docs/reliability.md)."""
    model, folder = str(embedded), str(tmp_path / "run")
    seed = "2" if script == "ppo" else "1"
    call(f"{script}.py", "--seed", seed, "--model", model, "--output-dir", folder, ranks=ranks)
    lines = read_jsonl(f"{folder}/metrics.jsonl")
    found = [line["eval/pass@1"] for line in lines if "eval/pass@1" in line]
    print(f"\n{script}, {ranks} ranks: pass@1 on validation problems {found}")
    assert max(found) > 0.13


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("zero_stage", ["0", "2", "3"])
@pytest.mark.parametrize("kind", [["--tied"], ["--no-tied"], ["--tied", "--padding", "30"]])
def test_sampler_and_trainer_agree(kind, zero_stage, ranks):
    check_parity(*kind, "--zero-stage", zero_stage, ranks=ranks)


def test_sampler_and_trainer_agree_in_bfloat16():
    check_parity("--tied", "--zero-stage", "2", "--dtype", "bfloat16", limit=0.1)


def test_two_ranks_hold_one_sampler():
    """Tensor parallel: every rank has prompts of its own, and the engine's parts follow a sync."""
    check_parity("--no-tied", "--zero-stage", "2", "--tensor-parallel-size", "2")


def test_fewer_responses_than_ranks_in_a_folder_with_a_strange_name(tmp_path, sft_model):
    """One rank has nothing to sample and nothing to train on."""
    sizes = ["--num-prompts", "1", "--group-size", "1", "--minibatch-size", "1", "--k", "2"]
    run = tmp_path / "lr=1e-6, [k] 2"
    options = ["--model", sft_model, "--eval-every", "0", "--save-every", "1"]
    call("vineppo.py", *sizes, *options, "--num-iterations", "2", "--output-dir", str(run), ranks=2)
    lines = timeless(run / "metrics.jsonl")
    assert [line["policy/sampler_gap"] < 1e-4 for line in lines] == [True, True]
    (run / "finished").unlink()
    shutil.rmtree(run / "checkpoints/iteration_000002")
    options += ["--resume", "auto", "--num-iterations", "2", "--output-dir", str(run)]
    call("vineppo.py", *sizes, *options, ranks=2)
    assert timeless(run / "metrics.jsonl") == lines


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory):
    folder = tmp_path_factory.mktemp("smollm2")
    call("-m", "recipes.smollm2", str(folder / "smollm2"))
    return folder


@pytest.mark.skipif(not os.path.isdir(DATA), reason="no data sets beside the clone")
@pytest.mark.parametrize(
    ("task", "run"),
    [
        ("gsm8k", "vineppo-smollm2"),
        ("math", "vineppo-smollm2-math"),
        ("gsm8k --chat", "vineppo-smollm2-chat"),
    ],
)
def test_smollm2_is_not_vacuous(smollm2, task, run):
    """The commands of docs/real_data.md, as they stand there."""
    task, _, is_chat = task.partition(" ")
    with open(f"{ROOT}/docs/real_data.md") as file:
        page = file.read().partition("### In ten minutes")[2].splitlines(keepends=True)
    lines = [line for line in page if line.startswith(".venv") and f"--task {task}" in line]
    lines = [line for line in lines if bool(is_chat) == ("--chat" in line)]
    assert len(lines) == (2 if task == "math" else 3)
    for line in lines:
        line = line.replace(f"--data-dir {task.upper()}", f"--data-dir {DATA}/{task}")
        line = re.sub(r" runs/", f" {smollm2}/", line)
        result = call(*line.split()[1:])
    print("\n" + result.stdout)
    metrics = read_jsonl(smollm2 / run / "metrics.jsonl")
    assert len(metrics) == 2
    for line in metrics:
        assert line["rollout/reward"] > 0 and line["policy/grad_norm"] > 0
        assert line["adv/undecided"] > 0
        assert line["policy/sampler_gap"] < 1e-4
    start = smollm2 / run.replace("vineppo", "sft") / "hf/model.safetensors"
    assert not filecmp.cmp(start, smollm2 / run / "hf/model.safetensors", shallow=False)
    steps = [len(e["steps"]) for e in read_jsonl(smollm2 / run / "episodes.jsonl")]
    assert max(steps) > 1


@pytest.mark.skipif(not os.path.isdir(DATA), reason="no data sets beside the clone")
def test_boxed_problems_of_ones_own(smollm2):
    """Twenty short problems of MATH as JSONL, behind the test above: the code is as it is."""
    model = smollm2 / "sft-smollm2-math/hf"
    if not model.exists():
        pytest.skip("test_smollm2_is_not_vacuous makes the checkpoint")
    own = smollm2 / "own"
    own.mkdir()
    problems = data.load_problems("math", "train", f"{DATA}/math")
    short = [one for one in problems if len(one.prompt) < 90 and len(one.solution) < 120][:20]
    lines = [json.dumps({"prompt": one.prompt, "answer": one.answer}) for one in short]
    (own / "train.jsonl").write_text("\n".join(lines))
    sizes = ["--max-model-len", "128", "--max-response-len", "64", "--num-prompts", "8"]
    sizes += ["--group-size", "4", "--minibatch-size", "16", "--k", "2", "--num-iterations", "2"]
    rules = ["--task", "jsonl", "--data-dir", str(own), "--grading-rule", "boxed"]
    rules += ["--step-rule", "math", "--eval-every", "0", "--learning-rate", "1e-6"]
    output = ["--model", str(model), "--output-dir", str(smollm2 / "vineppo-own")]
    print("\n" + call("vineppo.py", *rules, *sizes, *output).stdout)
    metrics = read_jsonl(smollm2 / "vineppo-own/metrics.jsonl")
    assert len(lines) == 20 and len(metrics) == 2
    assert sum(line["rollout/reward"] + line["adv/value"] for line in metrics) > 0


def test_gradients_point_the_same_way(embedded):
    """256 episodes with exact values against the exact gradient of others: two roads, one
    direction. (Where V before a digit stands for V after it, or a position is off, they part. The
    checkpoint has to know some facts: a shorter SFT's gradient is all noise.)"""
    sizes = ["--batches", "2", "--num-prompts", "32", "--exact-episodes", "2048", "--ks", "1"]
    result = call("-m", "analysis.gradient", "--model", str(embedded), *sizes)
    value, reward = map(
        float,
        result.stdout.split("mean exact V(prompt) ")[1].split("\n")[0].split(", mean reward "),
    )
    assert reward > 0.02 and abs(value - reward) < 4 * (reward / 2048) ** 0.5
    assert float(result.stdout.split("cosine of its two halves ")[1].split()[0]) > 0.5
    cosines = dict(re.findall(r"^(\w.*?)  +(-?[\d.]+) \+- ", result.stdout, re.MULTILINE))
    assert float(cosines["VinePPO, exact values"]) > 0.3
    assert {"constant baseline", "GRPO", "RLOO", "VinePPO, K = 1"} < cosines.keys()


# ---- set-up --------------------------------------------------------------------------------------


def test_install_falls_back_to_the_cpu_index(tmp_path):
    """pip without any configuration does not know PyTorch's CPU build; a local index does."""
    wheels = tmp_path / "simple/torch"
    wheels.mkdir(parents=True)
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(wheels)]
    if subprocess.call([*pip, "torch==2.13.0+cpu"]) != 0:
        index = "https://download.pytorch.org/whl/cpu"
        assert subprocess.call([*pip, "--index-url", index, "torch==2.13.0+cpu"]) == 0
    links = [f'<a href="{name}">{name}</a>' for name in os.listdir(wheels)]
    (wheels / "index.html").write_text("\n".join(links))
    project = copy_of_the_project(tmp_path / "project")
    bare = {k: v for k, v in os.environ.items() if not k.startswith("PIP_") or k == "PIP_CERT"}
    index = f"file://{tmp_path}/simple"
    environment = {**bare, "PIP_CONFIG_FILE": os.devnull, "TORCH_CPU_INDEX": index}
    result = subprocess.run(
        ["make", "install", f"PYTHON={sys._base_executable}"],
        cwd=project,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    assert f"pip does not find torch==2.13.0+cpu, so it comes from {index}" in result.stdout
    check_imports(project / ".venv/bin/python")
    again = subprocess.run(["make", "install"], cwd=project, capture_output=True, text=True)
    assert "Nothing to be done" in again.stdout


def test_pip_install_of_the_extra_alone_imports(tmp_path):
    project = copy_of_the_project(tmp_path / "project")
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv/bin/python"
    subprocess.run([python, "-m", "pip", "install", "-q", ".[cpu]"], cwd=project, check=True)
    check_imports(python)


def check_imports(python):
    code = "import vllm, deepspeed; from transformers import LlamaConfig, AutoModelForCausalLM"
    subprocess.run([python, "-c", code], check=True, capture_output=True)
