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
        run = importlib.import_module(words[1]).main

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

    assert count(f"{ROOT}/vineppo.py") <= 480
    assert count(f"{ROOT}/sft.py") <= 320
    assert count(*glob.glob(f"{ROOT}/common/*.py")) <= 2150
