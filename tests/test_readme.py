"""Every command in the README and the docs parses: flags exist, torchrun's own parser agrees."""

import dataclasses
import functools
import glob
import importlib
import os
import pathlib
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
    if words[:2] == ["-m", "mathequal"]:
        assert len(words) == 3  # a file
    elif words[0] == "-m":
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


def run_recipe(folder, path, *arguments, **variables):
    """The recipe with a torchrun that writes down its arguments instead of starting anything."""
    (folder / ".venv/bin").mkdir(parents=True)
    (folder / f"{arguments[0]}.py").touch()
    torchrun = folder / ".venv/bin/torchrun"
    torchrun.write_text('#!/bin/sh\nprintf "%s\\0" "$@" > arguments\n')
    torchrun.chmod(0o755)
    command, environment = ["bash", path, *arguments], {**os.environ, **variables}
    result = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
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
    is_fork = (method, name.split("_")[1]) == ("vineppo", "gsm8k")  # the one that has a cap
    assert parsed.module == is_fork
    script = "experiments.vineppo_cheap" if is_fork else f"{method}.py"
    assert parsed.training_script == script
    args = tyro.cli(
        importlib.import_module(script.removesuffix(".py")).Args, args=parsed.training_script_args
    )
    wrong = {k: v for k, v in expected(method, *name.split("_")).items() if getattr(args, k) != v}
    assert not wrong


def expected(method: str, model: str, task: str) -> dict:
    """The paper's settings (spelled out here once more, defaults included) and our few."""
    rho, math = model == "rho1b", task == "math"
    name = f"{model}-{task}"
    flags = {"task": task, "max_model_len": 2048 if rho else 2500}
    if method == "evaluate":
        flags |= {"model": "checkpoint", "rounds": 16, "temperature": 0.35, "split": "test"}
        return flags | {"top_p": 0.9, "max_response_len": 1024, "stop": "\n\n\nProblem:"}
    flags |= {"output_dir": f"runs/{method}-{name}", "seed": 7, "max_grad_norm": 1.0}
    flags |= {"zero_stage": 0 if rho else 2, "micro_batch_tokens": 16_384 if rho else 4_096}
    if method == "sft":
        base = "microsoft/rho-math-1b-v0.1" if rho else "deepseek-ai/deepseek-math-7b-base"
        flags |= {"model": base, "num_epochs": 3, "batch_size": 64, "warmup_fraction": 0.06}
        steps = 180 if math else 111
        flags |= {"save_every": steps, "eval_every": steps, "eval_problems": 500}
        return flags | {"learning_rate": 1e-5 if rho else 5e-5}
    flags |= {"model": f"runs/sft-{name}/best", "learning_rate": 1e-6, "warmup_fraction": 0.03}
    flags |= {"temperature": 0.6, "top_p": 0.9, "max_response_len": 1024, "minibatch_size": 64}
    flags |= {"stop": "\n\n\nProblem:", "gpu_memory_utilization": 0.5, "eval_temperature": 0.35}
    flags |= {"eval_problems": 500, "eval_rounds": 16, "group_size": 64 if "dpo" in method else 8}
    if method in ("ppo", "dpo_pos"):
        flags["gpu_memory_utilization"] = {"dpo_pos": 0.35, "ppo": 0.4 if rho else 0.3}[method]
    if method in ("restem", "dpo_pos"):
        flags["num_prompts"] = 11_498 if math else 7_100
        if method == "restem":
            return flags | {"num_iterations": 10, "update_epochs": 8, "eval_every": 500}
        flags |= {"beta": 0.1 if math else 0.3, "penalty": 50, "max_pairs": 64, "update_epochs": 3}
        every = 500 if rho else 450
        return flags | {"eval_every": every, "save_every": every}
    flags |= {"num_prompts": 64, "num_iterations": 1000 if math else 650, "update_epochs": 2}
    flags |= {"clip_coef": 0.2, "eval_every": 40, "save_every": 10}
    flags["kl_coef"] = 3e-3 if method in ("grpo", "rloo") else 1e-4
    if method == "vineppo":
        flags |= {"k": 9} if math else {"k": 9, "max_steps_valued": 25}
    if method == "ppo":
        flags |= {"gamma": 1, "gae_lambda": 1, "clip_coef_value": 0.2}
        flags["critic_learning_rate"] = 1e-6
    return flags


def test_recipes_are_all_there_and_name_a_wrong_method(tmp_path):
    names = [f"{m}_{d}.sh" for m in ("deepseekmath7b", "rho1b") for d in ("gsm8k", "math")]
    assert [os.path.basename(path) for path in RECIPES] == names
    result, words = run_recipe(tmp_path, RECIPES[0], "vinepo")
    assert result.returncode == 1 and words is None
    assert result.stderr == f"error: 'vinepo': {', '.join(METHODS[:-1])} or evaluate\n"


@pytest.mark.parametrize(
    ("variables", "ranks", "nodes"),
    [({"RANKS": "2"}, "2", "1:1"), ({"LAUNCH": "--nnodes 2 --nproc-per-node 4"}, "4", "2")],
)
def test_a_recipe_on_other_machines(variables, ranks, nodes, tmp_path):
    result, words = run_recipe(tmp_path, RECIPES[0], "grpo", **variables)
    assert result.returncode == 0, result.stderr
    parsed = get_args_parser().parse_args(words)
    assert (parsed.nproc_per_node, parsed.nnodes) == (ranks, nodes)
    assert parsed.training_script == "grpo.py"


def test_there_are_commands_to_test():
    assert len(list(commands())) > 15


FORKS = [f"experiments.vineppo_{name}" for name in ("cheap", "unsure", "tree")]
SCRIPTS = ["vineppo", "ppo", "grpo", "rloo", "restem", "dpo_pos", "sft", "evaluate"]


def read(path: str) -> str:
    return pathlib.Path(ROOT, path).read_text()


@pytest.mark.parametrize("script", [*SCRIPTS, *FORKS])
def test_every_flag_is_used(script):
    """A script's own in the script, what it inherits (and what engines need) in common/."""
    text = read(f"{script.replace('.', '/')}.py").split("def main(args")[1]
    plumbing = "".join(pathlib.Path(path).read_text() for path in glob.glob(f"{ROOT}/common/*.py"))
    args = importlib.import_module(script).Args
    inherited = {"top_p", "max_grad_norm", "max_response_len"} | {
        name for base in args.__mro__[1:-1] for name in base.__annotations__
    }
    for field in dataclasses.fields(args):
        place = text + plumbing if field.name in inherited else text
        assert re.search(rf"\bargs\.{field.name}\b", place), field.name


# Lines: what a reader of the scripts needs, then what models, problems and answers need.
ROOMS = {"common": (1600, 300), "given": (480, 150), "tasks": (530, 150), "mathequal": (1120, 540)}


@pytest.mark.parametrize("room", ROOMS)
def test_rooms_stay_small(room):
    lengths = {path: read(path).count("\n") for path in glob.glob(f"{room}/*.py", root_dir=ROOT)}
    in_all, a_file = ROOMS[room]
    assert sum(lengths.values()) <= in_all and max(lengths.values()) <= a_file, lengths


def count_words(path: str) -> int:
    """Without code and tables."""
    text = re.sub(r"^```.*?^```", "", read(path), flags=re.DOTALL | re.MULTILINE)
    return sum(len(line.split()) for line in text.splitlines() if not line.startswith("|"))


def test_pages_stay_short():
    pages = {*glob.glob("docs/*.md", root_dir=ROOT)} - {"docs/walkthrough.md", "docs/when.md"}
    assert count_words("README.md") <= 700
    assert count_words("docs/when.md") <= 850
    assert sum(map(count_words, pages)) <= 7500


def test_no_two_files_have_one_name():
    tracked = subprocess.check_output(["git", "ls-files", "*.py"], cwd=ROOT, text=True).split()
    names = [os.path.basename(path) for path in tracked if not path.endswith("__.py")]
    assert len(names) == len({*names}), {name for name in names if names.count(name) > 1}
