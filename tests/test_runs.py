"""The scripts with their real engines: runs, kills and resumes, ranks, sampler and trainer."""

import argparse
import errno
import filecmp
import hashlib
import json
import math
import os
import resource
import shutil
from types import SimpleNamespace

import pytest
import torch

from common import RunError, UsageError, engines, flags, ranks, run
from common import checkpoints as checkpoints_module
from common.checkpoints import Checkpoints
from tasks import chain
from tests.conftest import (
    SMALL,
    call,
    differences,
    read_jsonl,
    start_run,
    timeless,
)

FAST = [*SMALL, "--num-iterations", "4", "--save-every", "2"]


@pytest.fixture(scope="module")
def finished(sft_model, tmp_path_factory):
    """An uninterrupted run on one rank."""
    folder = tmp_path_factory.mktemp("run") / "whole"
    result = call("vineppo.py", *FAST, "--model", sft_model, "--output-dir", str(folder))
    return folder, result


def test_a_run_leaves_what_it_should(finished, sft_model):
    folder, result = finished
    lines = read_jsonl(folder / "metrics.jsonl")
    assert [line["iteration"] for line in lines] == [1, 2, 3, 4]
    assert (
        "4 prompts x 4 responses = 16 episodes = 2 minibatches x 2 epochs = 4 optimizer steps"
        in (result.stdout)
    )
    # its names are explained once; what is no terminal gets whole lines, and no bar
    for name in ("reward", "undecided", "pass@1", "sampler gap"):
        assert result.stdout.count(f"\n  {name}: ") == 1
    assert "\r" not in result.stdout + result.stderr and "it/s" not in result.stderr
    for line in lines:
        assert 0 < line["policy/sampler_gap"] < 1e-4
        assert 0 < line["policy/grad_norm"] < 100 and line["policy/skipped"] == 0
        assert 0 <= line["rollout/reward"] <= 1 and 0 <= line["adv/value"] <= 1
        assert line["rollout/unfinished"] < 1 and line["tokens/rollouts"] > line["tokens/sample"]
        assert {"time/sample", "time/rollouts", "time/update", "time/sync"} <= line.keys()
    assert ["eval/pass@1" in line for line in lines] == [False, True, False, True]
    distances = [line["policy/weight_distance"] for line in lines if "eval/pass@1" in line]
    assert 0 < distances[0] < distances[-1]
    names = sorted(os.listdir(folder / "checkpoints"))
    assert names[1:] == ["iteration_000002", "iteration_000004"] and names[0].startswith("best_")
    assert os.path.realpath(folder / "hf").endswith("iteration_000004/hf")
    assert os.path.isfile(folder / "best/model.safetensors")
    assert not filecmp.cmp(f"{sft_model}/model.safetensors", folder / "hf/model.safetensors", False)
    assert os.listdir(folder / "tensorboard")


@pytest.mark.parametrize(
    ("metrics", "best"),
    [
        ([{"eval/pass@1": x} for x in (0.1, 0.4, 0.4, 0.2)], 4),  # the first of equals
        ([{"eval/loss": x} for x in (0.9, 0.5, 0.2, 0.3)], 6),
        ([{}, {}, {}, {}], 8),
    ],
)
@pytest.mark.parametrize("knows_links", [True, False])
def test_the_best_checkpoint_stays(metrics, best, knows_links, monkeypatch, tmp_path):
    def refuse(source, target):
        raise OSError(errno.EPERM, "no such thing here")

    if not knows_links:
        monkeypatch.setattr(os, "link", refuse)
    tmp_path = tmp_path / "lr [1e-6]*"
    tmp_path.mkdir()
    logger = run.Run.__new__(run.Run)
    logger.folder, checkpoints = str(tmp_path), Checkpoints(str(tmp_path), {}, keep=1)
    lines = [{"iteration": i + 1} for i in range(8)]
    for line, more in zip(lines[1::2], metrics, strict=True):
        line |= more
        folder = tmp_path / f"checkpoints/iteration_{line['iteration']:06d}"
        (folder / "hf").mkdir(parents=True)
        (folder / "hf/weights").write_text(str(line["iteration"]))
        (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
        checkpoints.tidy_up(logger.read_scores())
    # of the best one there are the weights alone: the rest is for a resume
    found = sorted(os.listdir(tmp_path / "checkpoints"))
    assert found == [f"best_{best:06d}", "iteration_000008"]
    assert (tmp_path / "best/weights").read_text() == str(best)
    assert (tmp_path / "hf/weights").read_text() == "8"


def test_a_disk_without_room_is_named_at_the_start(monkeypatch, tmp_path):
    """Two are kept, a third is being written, and the best one's weights stay too."""
    ranks.set_up()
    engine = SimpleNamespace(module=torch.nn.Linear(1000, 1000, bias=False))  # 16 MB
    checkpoints = Checkpoints(str(tmp_path), {}, keep=2)
    (tmp_path / "checkpoints").mkdir()
    for free, done, fits in ((53e6, 0, True), (51e6, 0, False), (33e6, 1, False), (37e6, 1, True)):
        monkeypatch.setattr(shutil, "disk_usage", lambda _, free=free: SimpleNamespace(free=free))
        for iteration in range(done):
            (tmp_path / f"checkpoints/iteration_{iteration:06d}").mkdir(exist_ok=True)
        if fits:
            checkpoints.check_room({"policy": engine})
            continue
        with pytest.raises(UsageError, match="for each of --keep-checkpoints 2 and"):
            checkpoints.check_room({"policy": engine})


def test_digests_are_of_pieces_that_are_shared(monkeypatch, tmp_path):
    ranks.set_up()
    monkeypatch.setattr(checkpoints_module, "PIECE", 10)
    monkeypatch.setattr(checkpoints_module, "BLOCK", 5)
    (tmp_path / "one").mkdir()
    (tmp_path / "one/file").write_bytes(bytes(range(25)))
    (tmp_path / "empty").touch()
    (tmp_path / "manifest.json").touch()
    parts = [bytes(range(25))[i : i + 10] for i in (0, 10, 20)]
    assert checkpoints_module.digest_files(str(tmp_path)) == {
        "empty": [hashlib.sha256(b"").hexdigest()],
        "one/file": [hashlib.sha256(part).hexdigest() for part in parts],
    }


def test_episodes_are_readable_and_their_credit_adds_up(finished):
    folder, result = finished
    for episode in read_jsonl(folder / "episodes.jsonl"):
        steps = episode["steps"]
        total = sum(step["advantage"] for step in steps)
        assert total == pytest.approx(episode["reward"] - steps[0]["value"], abs=1e-5)
        assert all(step["text"].endswith("\n") for step in steps[:-1])
        assert all(step["value"] * 3 == pytest.approx(round(step["value"] * 3)) for step in steps)
    assert "value advantage  step" in result.stdout


def test_terminated_then_damaged_it_resumes_bit_for_bit(finished, sft_model, tmp_path):
    """SIGTERM in the third iteration, whose checkpoint is then cut off. In a folder whose name
    DeepSpeed would take for a pattern. (kill -9: the soak.)"""
    whole, folder = finished[0], tmp_path / "the run [1]"
    arguments = ["vineppo.py", *FAST, "--model", sft_model, "--output-dir", str(folder)]
    status, output = end_at("SIGTERM grade 6", arguments)
    assert status == 143 and "SIGTERM: checkpoint 3 is written; continue with --resume" in output
    names = ["best_000002", "iteration_000002", "iteration_000003"]
    assert sorted(os.listdir(folder / "checkpoints")) == names
    assert len(timeless(folder / "metrics.jsonl")) == 3
    name = "policy/mp_rank_00_model_states.pt"
    weights = folder / "checkpoints/iteration_000003" / name
    with open(weights, "r+b") as file:
        file.truncate(weights.stat().st_size // 2)
    result = call(*arguments, "--resume", "auto")
    assert f"WARNING: checkpoint 3 is damaged ({name}): skipped" in result.stdout
    assert any(name.startswith("damaged_3_") for name in os.listdir(folder / "checkpoints"))
    check_same_run(folder, whole)


HANG = 900  # seconds: no test waits that long for what works, however busy the machine is


def end_at(moment: str, arguments, ranks: int = 1) -> tuple[int, str]:
    """A run whose rank 0 gets a signal at a phase of its own (tests/kills.py); exit status and
    output."""
    words = ["-m", "tests.kills", *arguments]
    process = start_run(words, ranks, PHASES=os.devnull, END_AT=moment)
    output, _ = process.communicate(timeout=HANG)
    return process.returncode, output


def check_same_run(folder, whole) -> None:
    assert differences(folder, whole) == []


@pytest.fixture
def checkpoints(tmp_path):
    """Three small ones, written as the scripts write theirs."""
    ranks.set_up()
    settings = {"seed": 1, "script": "vineppo", "world_size": 1}
    made = Checkpoints(str(tmp_path), settings, keep=9)
    (tmp_path / "checkpoints").mkdir()
    tokenizer = chain.make_tokenizer()
    model = chain.make_model(tokenizer, seed=1)
    for iteration in (2, 4, 6):
        made.save(iteration, {"policy": Engine(1_000)}, model, tokenizer)
    return made


class Engine:
    """Stands in for a DeepSpeed engine: writes a checkpoint's file with torch.save."""

    def __init__(self, size: int):
        self.states = torch.arange(size)

    def save_checkpoint(self, folder, tag, save_latest):
        os.makedirs(f"{folder}/{tag}")
        torch.save(self.states, f"{folder}/{tag}/states.pt")


def damage_cut(path):
    with open(f"{path}/policy/states.pt", "r+b") as file:
        file.truncate(100)


def damage_bit(path):
    with open(f"{path}/hf/model.safetensors", "r+b") as file:
        file.seek(5000)
        byte = file.read(1)
        file.seek(5000)
        file.write(bytes([byte[0] ^ 1]))


def replace_in(path, old, new):
    with open(path) as file:
        text = file.read()
    assert text.count(old) == 1
    with open(path, "w") as file:
        file.write(text.replace(old, new))


def cut_manifest(path):
    """Valid JSON, but of some of the files only."""
    with open(f"{path}/manifest.json") as file:
        manifest = json.load(file)
    del manifest["policy/states.pt"]
    with open(f"{path}/manifest.json", "w") as file:
        json.dump(manifest, file)


@pytest.mark.parametrize(
    ("damage", "name"),
    [
        (damage_cut, "policy/states.pt"),
        (damage_bit, "hf/model.safetensors"),
        (lambda path: os.remove(f"{path}/hf/config.json"), "hf/config.json"),
        (lambda path: os.remove(f"{path}/manifest.json"), "manifest.json"),
        (lambda path: open(f"{path}/manifest.json", "w").close(), "manifest.json"),
        (
            lambda path: replace_in(f"{path}/settings.json", '"seed": 1', '"seed": 3'),
            "settings.json",
        ),
        (cut_manifest, "policy/states.pt"),
        (lambda path: os.remove(f"{path}/settings.json"), "settings.json"),
        (lambda path: open(f"{path}/hf/more", "w").close(), "hf/more"),
    ],
)
def test_a_damaged_checkpoint_is_passed_by(checkpoints, damage, name, capsys):
    assert checkpoints.find_whole() == 6
    damage(checkpoints.path(6))
    assert checkpoints.find_whole() == 4 and checkpoints.iterations() == [2, 4]
    assert f"WARNING: checkpoint 6 is damaged ({name}): skipped" in capsys.readouterr().out
    for iteration in (2, 4):
        damage(checkpoints.path(iteration))
    for _ in range(2):  # the second time too: it does not begin again in silence
        with pytest.raises(UsageError, match="all checkpoints are damaged; start a new"):
            checkpoints.find_whole()


def test_a_checkpoint_of_older_code_is_not_called_damaged(checkpoints):
    path = f"{checkpoints.path(6)}/manifest.json"
    with open(path, "w") as file:
        json.dump({"settings.json": "a digest of the whole file"}, file)
    with pytest.raises(UsageError, match="written by an older version of this code; start a new"):
        checkpoints.find_whole()
    assert checkpoints.iterations() == [2, 4, 6]


@pytest.mark.parametrize(
    "setting", [{"world_size": 8}, {"script": "ppo"}, {"model": "another"}, {"seed": 2}]
)
def test_another_runs_checkpoint_is_refused(checkpoints, setting):
    checkpoints.settings = {**checkpoints.settings, **setting}
    (name,) = setting
    with pytest.raises(UsageError, match=rf"iteration_000006 has other settings: {name} was "):
        checkpoints.find_whole()


@pytest.mark.parametrize("size", [0, 1_000_000])
def test_a_full_disk_keeps_the_last_checkpoint(checkpoints, tmp_path, size):
    """No file may grow beyond 100 kB: the kernel's own error, in torch.save or in safetensors."""
    tokenizer = chain.make_tokenizer()
    model = chain.make_model(tokenizer, seed=1)
    trained = {"policy": Engine(size)}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with pytest.raises(
            RunError, match=r"checkpoint 8 could not be written .*point 6 is intact"
        ):
            checkpoints.save(8, trained, model, tokenizer)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert checkpoints.find_whole() == 6
    assert sorted(os.listdir(tmp_path / "checkpoints"))[-1] == "iteration_000006"
    checkpoints.save(8, trained, model, tokenizer)
    assert checkpoints.find_whole() == 8


def test_resume_with_other_settings_names_them(finished, sft_model):
    folder, _ = finished
    arguments = [*FAST, "--model", sft_model, "--output-dir", str(folder), "--resume", "auto"]
    result = call("vineppo.py", *arguments, "--clip-coef", "0.1", fails=True)
    assert "settings that it began with: clip_coef was 0.2, is 0.1" in result.stderr


def test_what_may_change_on_a_resume_changes_no_result():
    free = {"resume", "output_dir", "track", "save_every", "keep_checkpoints"}
    free |= {"gpu_memory_utilization", "micro_batch_tokens", "gradient_checkpointing"}
    assert {*flags.FREE} == free


@pytest.mark.soak  # tests/test_second.py computes two ranks a second time there, too
def test_two_ranks_with_nine_rollouts_draw_the_same_prompts(finished, sft_model, tmp_path):
    folder = tmp_path / "two"
    arguments = ["--model", sft_model, "--output-dir", str(folder), "--num-prompts", "4"]
    arguments += ["--group-size", "4", "--minibatch-size", "8", "--eval-problems", "10"]
    call("vineppo.py", "--k", "9", "--num-iterations", "2", *arguments, ranks=2)
    assert all(line["policy/sampler_gap"] < 1e-4 for line in read_jsonl(folder / "metrics.jsonl"))
    prompts = [  # the first of an iteration's four episodes is one that depends on the samples
        [line["prompt"] for i, line in enumerate(read_jsonl(path / "episodes.jsonl")[:8]) if i % 4]
        for path in (folder, finished[0])
    ]
    assert prompts[0] == prompts[1] and len(set(prompts[0])) == 6


@pytest.mark.soak  # on one rank tests/test_second.py holds them
@pytest.mark.parametrize(("script", "ranks"), [("grpo.py", 1), ("rloo.py", 2), ("ppo.py", 2)])
def test_the_other_estimators_run(script, ranks, sft_model, tmp_path):
    folder = tmp_path / "run"
    options = [*SMALL, "--num-iterations", "2", "--model", sft_model, "--output-dir", str(folder)]
    del options[options.index("--k") : options.index("--k") + 2]
    call(script, *options, "--group-size", "8", "--temperature", "1.0", ranks=ranks)
    for line in read_jsonl(folder / "metrics.jsonl"):
        assert line["policy/sampler_gap"] < 1e-4
        assert "tokens/rollouts" not in line  # no credit to pay for
        if script == "ppo.py":
            assert line["adv/value_error"] > 0 and 0 < line["value/grad_norm"] < 1000
            assert line["adv/explained_variance"] < 1 and line["loss/value"] > 0
        else:
            assert 0 <= line["adv/undecided"] <= 1
    for episode in read_jsonl(folder / "episodes.jsonl"):
        assert episode["steps"][0]["text"] and (script == "ppo.py" or len(episode["steps"]) == 1)


@pytest.mark.soak
@pytest.mark.parametrize(("script", "ranks"), [("restem.py", 2), ("dpo_pos.py", 1)])
def test_the_baselines_run(script, ranks, sft_model, tmp_path):
    folder = tmp_path / "run"
    options = ["--model", sft_model, "--output-dir", str(folder), "--eval-problems", "10"]
    options += ["--eval-rounds", "2", "--minibatch-size", "4", *BASELINES[script]]
    result = call(script, *options, ranks=ranks)
    lines = read_jsonl(folder / "metrics.jsonl")
    if script == "restem.py":
        assert [line["iteration"] for line in lines] == [1, 2]
        for line in lines:
            assert 0 < line["walk/kept"] == round(line["rollout/reward"] * 8 * 16)
            assert line["walk/chosen_update"] <= line["walk/updates"]
            assert (line["policy/weight_distance"] > 0) == (line["walk/chosen_update"] > 0)
        assert result.stdout.count("walk: step 0 of ") == 2
    else:
        assert lines[0]["dpo/chosen_logratio"] == lines[0]["dpo/rejected_logratio"] == 0
        assert lines[0]["loss/dpo"] == pytest.approx(math.log(2))
        assert lines[-1]["dpo/chosen_logratio"] > lines[-1]["dpo/rejected_logratio"]
        assert ["eval/pass@1" in line for line in lines[:4]] == [False, True, False, True]
        assert all(line["dpo/chosen_logprob"] < 0 for line in lines)
        assert 0 < lines[-1]["policy/weight_distance"] < 1
    assert os.path.exists(folder / "hf/model.safetensors")


BASELINES = {  # two iterations; some gradient steps
    "restem.py": ["--num-prompts", "8", "--group-size", "16", "--num-iterations", "2"],
    "dpo_pos.py": ["--num-prompts", "4", "--group-size", "16", "--update-epochs", "1"],
}
BASELINES["restem.py"] += ["--update-epochs", "2", "--eval-every", "3"]
BASELINES["dpo_pos.py"] += ["--max-pairs", "8", "--save-every", "2", "--eval-every", "2"]


@pytest.mark.soak  # tests/test_second.py holds its scores on one rank
def test_evaluate_gives_an_interval_on_any_number_of_ranks(finished, tmp_path):
    folder, _ = finished
    output = tmp_path / "result.json"
    arguments = ["--num-problems", "31", "--rounds", "4", "--output", str(output)]
    result = call("evaluate.py", "--model", str(folder / "hf"), *arguments, ranks=2)
    saved = json.loads(output.read_text())
    assert len(saved["scores"]) == 31 and set(saved["scores"]) <= {0, 0.25, 0.5, 0.75, 1}
    assert saved["pass@1"] == pytest.approx(sum(saved["scores"]) / 31)
    assert saved["interval"][0] <= saved["pass@1"] <= saved["interval"][1]
    assert f"pass@1 (test, 31 problems, 4 rounds): {saved['pass@1']:.3f}" in result.stdout
    assert "(0 answers counted as wrong because grading failed)" in result.stdout


def test_a_check_leaves_its_callers_numbers_as_they_are(tmp_path):
    logger = run.Run.__new__(run.Run)
    logger.args, logger.folder = argparse.Namespace(dtype="float32"), str(tmp_path)
    logger.iteration, logger.is_main = 3, True
    metrics, values = {"a": 1.0, "b": math.nan}, torch.tensor([1.0, math.inf])
    with pytest.raises(RunError, match=r"iteration 3: b is nan, values is not finite; the batch"):
        logger.check(metrics, values=values)
    assert list(metrics) == ["a", "b"] and values.tolist() == [1.0, math.inf]
    assert torch.load(tmp_path / "stopped_000003.pt")["values"].tolist() == [1.0, math.inf]


def partition_all(monkeypatch):
    """ZeRO 3 spreads small weights over the ranks too."""
    ranks.set_up()
    import deepspeed

    initialize = deepspeed.initialize

    def initialize_with(config, **options):
        config["zero_optimization"]["stage3_param_persistence_threshold"] = 0
        return initialize(config=config, **options)

    monkeypatch.setattr(deepspeed, "initialize", initialize_with)


def tiny_engine(zero_stage: int, dtype: str):
    args = argparse.Namespace(zero_stage=zero_stage, dtype=dtype, max_grad_norm=0.0)
    args.gradient_checkpointing = False
    return engines.initialize(chain.make_model(chain.make_tokenizer(), seed=0), args)


def weights_of(engine) -> list[torch.Tensor]:
    with engines.whole(engine.module.parameters()):
        return [p.detach().clone() for p in engine.module.parameters()]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("zero_stage", [0, 2, 3])
def test_discarded_gradients_leave_nothing_behind(zero_stage, dtype, monkeypatch):
    partition_all(monkeypatch)

    def backward(engine, token, is_last):
        engine.set_gradient_accumulation_boundary(is_last)
        engine.backward(engine(torch.full((2, 9), token)).logits.float().square().mean())

    outcomes = []
    for discards in (True, False):
        engine = tiny_engine(zero_stage, dtype)
        if discards:
            backward(engine, 5, False)
            backward(engine, 6, True)
            engines.discard_gradients(engine)
        norms = []
        for token in (7, 8):
            backward(engine, token, False)
            backward(engine, token + 1, True)
            norms.append(engines.step(engine, 1e-3))
        outcomes.append((norms, weights_of(engine)))
    assert outcomes[0][0] == outcomes[1][0] and outcomes[0][0][0] > 0
    assert all(torch.equal(*pair) for pair in zip(outcomes[0][1], outcomes[1][1], strict=True))


@pytest.mark.parametrize("broken", [math.nan, math.inf])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("zero_stage", [0, 2, 3])
def test_a_broken_gradient_has_a_broken_norm(zero_stage, dtype, broken, monkeypatch):
    """So that the check after the step sees it."""
    partition_all(monkeypatch)
    engine = tiny_engine(zero_stage, dtype)
    for factor in (1.0, broken):
        engine.set_gradient_accumulation_boundary(True)
        engine.backward(engine(torch.full((2, 9), 5)).logits.float().square().mean() * factor)
        assert math.isfinite(engines.step(engine, 1e-3)) == (factor == 1.0)
