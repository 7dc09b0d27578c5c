"""Every command in the README and the docs parses: flags exist, torchrun's own parser agrees."""

import functools
import glob
import importlib
import os
import re
import shlex
import subprocess

import pytest
import tyro
from torch.distributed.run import get_args_parser

from tests.conftest import ROOT


def commands():
    paths = [f"{ROOT}/README.md", *glob.glob(f"{ROOT}/docs/*.md"), *glob.glob(f"{ROOT}/*.py")]
    paths += [*glob.glob(f"{ROOT}/recipes/*.py"), *glob.glob(f"{ROOT}/analysis/*.py")]
    for path in paths:
        with open(path) as file:
            for line in file:
                line = line.strip().removeprefix("$ ")
                if re.match(
                    r"(\.venv/bin/)?(python (-m |\w+\.py)|torchrun --)|make( [a-z]+)$", line
                ):
                    line = re.split(r"  +|  *#", line)[0]  # a comment behind it
                    yield pytest.param(line, id=f"{os.path.basename(path)}: {line[:60]}")


def parse(words: list[str]) -> None:
    if words[0] == "-m":
        module = importlib.import_module(words[1])
        if hasattr(module, "Args"):
            tyro.cli(module.Args, args=words[2:])
            return
        run = module.main

        @functools.wraps(run)  # its flags, but it does nothing
        def target(*_, **__):
            pass

        tyro.cli(target, args=words[2:])
    else:
        module = words[0].removesuffix(".py").replace("batch_mean", "rloo")  # docs/fork.md's copy
        tyro.cli(importlib.import_module(module).Args, args=words[1:])


@pytest.mark.parametrize("line", list(commands()))
def test_command_parses(line):
    words = shlex.split(line)
    program, rest = os.path.basename(words[0]), words[1:]
    if program == "make":
        result = subprocess.run(["make", "-n", *rest], cwd=ROOT, capture_output=True, text=True)
        assert result.returncode == 0, result.stderr
        return
    if program == "torchrun":
        parsed = get_args_parser().parse_args(rest)
        rest = [parsed.training_script, *parsed.training_script_args]
    parse(rest)


METHODS = ["sft", "vineppo", "ppo", "grpo", "rloo", "restem", "dpo_pos", "evaluate"]
RECIPES = sorted(glob.glob(f"{ROOT}/recipes/*_*.sh"))


def run_recipe(folder, path, *arguments):
    """The recipe with a torchrun that writes down its arguments instead of starting anything."""
    (folder / ".venv/bin").mkdir(parents=True)
    torchrun = folder / ".venv/bin/torchrun"
    torchrun.write_text('#!/bin/sh\nprintf "%s\\0" "$@" > arguments\n')
    torchrun.chmod(0o755)
    result = subprocess.run(["bash", path, *arguments], cwd=folder, capture_output=True, text=True)
    file = folder / "arguments"
    return result, file.read_text().split("\0")[:-1] if file.exists() else None


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("path", RECIPES, ids=os.path.basename)
def test_recipe_parses(path, method, tmp_path):
    name = os.path.basename(path).removesuffix(".sh")
    extra = ["--model", "checkpoint"] if method == "evaluate" else ["--seed", "7"]
    result, words = run_recipe(tmp_path, path, method, *extra)
    assert result.returncode == 0, result.stderr
    parsed = get_args_parser().parse_args(words)
    assert parsed.nproc_per_node == ("4" if "rho" in name else "8")
    args = tyro.cli(
        importlib.import_module(parsed.training_script.removesuffix(".py")).Args,
        args=parsed.training_script_args,
    )
    assert parsed.training_script == f"{method}.py" and args.task == name.split("_")[1]
    assert args.max_model_len == (2048 if "rho" in name else 2500)
    if method == "evaluate":
        assert (args.model, args.rounds, args.temperature) == ("checkpoint", 16, 0.35)
    else:
        assert args.seed == 7 and args.output_dir == f"runs/{method}-{name.replace('_', '-')}"
    if method not in ("sft", "evaluate"):
        assert args.model == f"runs/sft-{name.replace('_', '-')}/hf"  # where `sft` leaves it
        assert (
            args.temperature == 0.6
            and args.learning_rate == 1e-6
            and args.stop[-9:] == "\nProblem:"
        )
        assert args.group_size == (64 if method == "dpo_pos" else 8) and args.minibatch_size == 64


def test_recipes_are_all_there_and_name_a_wrong_method(tmp_path):
    names = [f"{m}_{d}.sh" for m in ("deepseekmath7b", "rho1b") for d in ("gsm8k", "math")]
    assert [os.path.basename(path) for path in RECIPES] == names
    result, words = run_recipe(tmp_path, RECIPES[0], "vinepo")
    assert result.returncode == 1 and words is None
    assert result.stderr == f"error: 'vinepo': {', '.join(METHODS[:-1])} or evaluate\n"


def test_there_are_commands_to_test():
    assert len(list(commands())) > 15


SCRIPTS = ["vineppo", "ppo", "grpo", "rloo", "restem", "dpo_pos", "sft", "evaluate"]


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_flag_is_used(script):
    import dataclasses

    with open(f"{ROOT}/{script}.py") as file:
        text = file.read().split("def main(args")[1]
    text += "args.resume args.output_dir args.track args.keep_checkpoints" * ("run.Run(" in text)
    for field in dataclasses.fields(importlib.import_module(script).Args):
        assert re.search(rf"args\.{field.name}\b", text), field.name


def test_line_budgets():
    def count(*paths):
        return sum(len(open(path).readlines()) for path in paths)

    assert count(f"{ROOT}/vineppo.py") <= 485
    assert count(f"{ROOT}/sft.py") <= 320
    assert count(*glob.glob(f"{ROOT}/common/*.py")) <= 2220
