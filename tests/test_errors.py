"""What can be given wrong gets one message that names it, before any engine starts."""

import json
import os
import shutil
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.conftest import call

GOOD_LINE = '{"prompt": "1+1=?", "answer": "2"}\n'


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Each case once, two at a time."""
    folder = tmp_path_factory.mktemp("errors")
    for name, text in {"empty": "", "bad": GOOD_LINE + '{"prompt": \n', "missing": None}.items():
        (folder / name).mkdir()
        if text is not None:
            (folder / name / "train.jsonl").write_text(text)
    (folder / "no_checkpoint").mkdir()
    (folder / "no_weights").mkdir()
    from common import data

    tokenizer = data.make_chain_tokenizer()
    tokenizer.save_pretrained(folder / "no_weights")
    data.make_chain_model_config(tokenizer).save_pretrained(folder / "no_weights")
    shutil.copytree(folder / "no_weights", folder / "cut_off")
    (folder / "cut_off/model.safetensors").write_bytes(b"\x10\x27" + bytes(100))
    (folder / "run").mkdir()
    (folder / "run" / "args.json").write_text(json.dumps({"seed": 99, "k": 9}))
    run = ["--output-dir", f"{folder}/run"]
    cases = {
        "task": ["--task", "nope"],
        "no data dir": ["--task", "jsonl"],
        "no such data dir": ["--task", "jsonl", "--data-dir", f"{folder}/nowhere"],
        "missing file": ["--task", "jsonl", "--data-dir", f"{folder}/missing"],
        "empty file": ["--task", "jsonl", "--data-dir", f"{folder}/empty"],
        "bad file": ["--task", "jsonl", "--data-dir", f"{folder}/bad"],
        "no model": ["--model", f"{folder}/nowhere"],
        "no checkpoint": ["--model", f"{folder}/no_checkpoint"],
        "no weights": ["--model", f"{folder}/no_weights"],
        "batch": ["--minibatch-size", "24"],
        "k": ["--k", "0"],
        "zero": ["--num-prompts", "0"],
        "greedy": ["--eval-temperature", "0"],
        "too long": ["--max-model-len", "256", "--model", f"{folder}/no_weights"],
        "cut off": ["--model", f"{folder}/cut_off"],
        "long": ["--max-response-len", "128"],
        "other settings": ["--resume", "auto", *run],
        "nothing to resume": ["--resume", "auto", "--output-dir", f"{folder}/nowhere"],
        "holds a run": run,
        "grpo alone": ["grpo.py", "--group-size", "1", "--minibatch-size", "8"],
        "rloo alone": ["rloo.py", "--group-size", "1", "--minibatch-size", "8"],
        "gamma": ["ppo.py", "--gamma", "1.5"],
        "lambda": ["ppo.py", "--gae-lambda", "-0.1"],
        "critic": ["ppo.py", "--critic-learning-rate", "0"],
        "walk": ["restem.py", "--eval-every", "0"],
        "pair": ["dpo_pos.py", "--group-size", "1"],
        "beta": ["dpo_pos.py", "--beta", "0"],
        "penalty": ["dpo_pos.py", "--penalty", "-1"],
        "pairs": ["dpo_pos.py", "--max-pairs", "0"],
    }

    def one(arguments):
        if "--output-dir" not in arguments:
            arguments = [*arguments, "--output-dir", f"{folder}/new"]
        script = [] if arguments[0].endswith(".py") else ["vineppo.py"]
        return call(*script, *arguments, fails=True)

    with ThreadPoolExecutor(2) as pool:
        return dict(zip(cases, pool.map(one, cases.values()), strict=True)), folder


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("task", "--task nope: no such task; there are chain, gsm8k, math, jsonl"),
        ("no data dir", "--task jsonl reads a folder of JSONL files: name it with --data-dir"),
        ("no such data dir", "--data-dir {folder}/nowhere: no such folder"),
        ("missing file", "{folder}/missing/train.jsonl: no such file"),
        ("empty file", "{folder}/empty/train.jsonl: empty, expected one JSON object a line"),
        ("bad file", "{folder}/bad/train.jsonl:2: not JSON"),
        ("no model", "--model {folder}/nowhere: no such folder"),
        ("no checkpoint", "--model {folder}/no_checkpoint: not a checkpoint"),
        (
            "no weights",
            "--model {folder}/no_weights: not a checkpoint (no model.safetensors in it)",
        ),
        ("batch", "--minibatch-size 24 does not divide the 64 responses of an iteration"),
        ("k", "--k 0: a value needs at least one rollout"),
        ("zero", "--num-prompts 0: must be at least 1"),
        ("greedy", "--eval-temperature 0.0: must be above 0 and at most 2"),
        ("too long", "--max-model-len 256: {folder}/no_weights was made for at most 128 tokens"),
        ("cut off", "--model {folder}/cut_off: not a checkpoint"),
        ("long", "--max-response-len 128 leaves no room for a prompt in --max-model-len 128"),
        ("other settings", "--resume auto: {folder}/run was made with other settings: "),
        ("nothing to resume", "--resume auto: no run to resume in {folder}/nowhere"),
        ("grpo alone", "--group-size 1: a group of one says nothing"),
        ("rloo alone", "--group-size 1: a group of one says nothing"),
        ("gamma", "--gamma 1.5: must be between 0 and 1"),
        ("lambda", "--gae-lambda -0.1: must be between 0 and 1"),
        ("critic", "--critic-learning-rate 0.0: must be above 0"),
        ("walk", "--eval-every 0: the walk needs checkpoints to evaluate"),
        ("pair", "--group-size 1: a pair needs two responses"),
        ("beta", "--beta 0.0: must be above 0"),
        ("penalty", "--penalty -1.0: must be 0 (plain DPO) or more"),
        ("pairs", "--max-pairs 0: must be at least 1"),
        ("holds a run", "{folder}/run already holds a run: go on with it (--resume auto) or name"),
    ],
)
def test_one_message_and_no_traceback(results, case, message):
    outcomes, folder = results
    lines = outcomes[case].stderr.strip().splitlines()
    assert len(lines) == 1, lines  # so no traceback, and no engine's log
    assert lines[0].startswith("error: " + message.format(folder=folder))
    assert not os.path.exists(folder / "new")


def test_missing_sft_checkpoint_names_the_command(tmp_path, monkeypatch):
    from common import UsageError, run

    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        UsageError, match=r"--model runs/sft/hf: no such folder; `python sft\.py` makes"
    ):
        run.check_model("runs/sft/hf", 128)


def test_ranks_say_it_once():
    result = call("vineppo.py", "--minibatch-size", "24", ranks=2, fails=True)
    assert result.stderr.count("error: --minibatch-size 24 does not divide") == 1
    assert 'vineppo.py", line' not in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--num-epochs", "0"], "error: --num-epochs 0.0: must be above 0"),
        (["--task", "jsonl"], "error: --model embedded knows the characters of --task chain only"),
    ],
)
def test_sft(arguments, message):
    result = call("sft.py", *arguments, fails=True)
    assert result.stderr.startswith(message) and "Traceback" not in result.stderr


def test_evaluate():
    result = call("evaluate.py", "--model", "nowhere/at/all", fails=True)
    assert result.stderr.startswith("error: --model nowhere/at/all: no such folder")
