"""An iteration of grpo.py against one of TRL's GRPOTrainer, on this machine.

    python -m benchmarks.against_trl                                the embedded model
    python -m benchmarks.against_trl --model runs/smollm2 --task gsm8k --data-dir GSM8K ...

The same model, prompts, episodes, epochs, minibatches and precision; TRL in an environment of its
own (.venv-trl, made on the first call), with transformers' generate, since its vLLM mode does not
run on a CPU. The two take turns, twice, so that a busy machine slows both; medians over iterations
without each run's first two.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from importlib.metadata import version

import tyro

import grpo
from analysis.curves import read_metrics
from benchmarks.plan import ROOT
from common import data, run

WARM_UP = 2
VENV = os.path.join(ROOT, ".venv-trl")
TRL = "1.16.0"


@dataclass
class Args:
    model: str = "runs/sft/hf"
    task: str = "chain"
    data_dir: str = ""
    num_iterations: int = 6
    """measured in each run"""
    turns: int = 2
    num_prompts: int = grpo.Args.num_prompts
    group_size: int = grpo.Args.group_size
    minibatch_size: int = grpo.Args.minibatch_size
    update_epochs: int = grpo.Args.update_epochs
    max_model_len: int = grpo.Args.max_model_len
    max_response_len: int = grpo.Args.max_response_len


def make_venv() -> str:
    python = os.path.join(VENV, "bin/python")
    if not os.path.exists(os.path.join(VENV, "installed")):
        print(f"an environment with TRL {TRL}, about 2 GB: {VENV}")
        subprocess.run([sys.executable, "-m", "venv", VENV], check=True)
        wanted = [f"trl=={TRL}", "accelerate", "datasets"]
        wanted += [f"{name}=={version(name)}" for name in ("torch", "transformers")]
        index = os.environ.get("TORCH_CPU_INDEX") or "https://download.pytorch.org/whl/cpu"
        pip = [python, "-m", "pip", "install", "--quiet", *wanted]
        if subprocess.call(pip) != 0:  # as install.py does
            subprocess.run([*pip, "--extra-index-url", index], check=True)
        with open(os.path.join(VENV, "installed"), "w"):
            pass
    return python


def run_ours(args: Args, options: dict) -> tuple[list[float], float]:
    """(seconds of each iteration, mean response length)."""
    total = args.num_iterations + WARM_UP
    with tempfile.TemporaryDirectory() as folder:
        flags = {**options, "output_dir": f"{folder}/run", "num_iterations": total}
        flags |= {"eval_every": 0, "save_every": total, "task": args.task}
        flags |= {"data_dir": args.data_dir, "max_model_len": args.max_model_len}
        command = [sys.executable, "grpo.py"]
        for name, value in flags.items():
            command += [f"--{name.replace('_', '-')}", str(value)]
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        lines = list(read_metrics(f"{folder}/run"))[WARM_UP:]
    seconds = [line["time/iteration"] - line.get("time/save", 0) for line in lines]
    return seconds, statistics.mean(line["rollout/response_length"] for line in lines)


def run_trl(args: Args, options: dict, python: str) -> tuple[list[float], float]:
    problems = data.load_problems(args.task, "train", args.data_dir)
    total = args.num_iterations + WARM_UP
    drawn = run.draw(len(problems), 0, total * args.num_prompts, grpo.Args.seed)  # as grpo.py does
    with tempfile.TemporaryDirectory() as folder:
        job = {**options, "folder": folder, "num_iterations": total}
        job |= {"num_responses": args.num_prompts * args.group_size}
        job |= {"temperature": grpo.Args.temperature, "kl_coef": grpo.Args.kl_coef}
        job["model"] = os.path.abspath(args.model)
        job |= {"prompts": [problems[i].prompt for i in drawn]}
        job |= {"answers": [problems[i].answer for i in drawn]}
        done = subprocess.run(
            [python, os.path.join(ROOT, "benchmarks/trl_worker.py")],
            input=json.dumps(job),
            cwd=folder,
            check=True,
            stdout=subprocess.PIPE,
            text=True,
        )
    found = json.loads(done.stdout.split("TRL ")[-1])
    return found["seconds"][WARM_UP:], found["length"]


def main(args: Args) -> None:
    python = make_venv()
    names = ("model", "num_prompts", "group_size", "minibatch_size", "update_epochs")
    options = {name: getattr(args, name) for name in (*names, "max_response_len")}
    options["learning_rate"] = grpo.Args.learning_rate
    ours, theirs, lengths = [], [], []
    for _ in range(args.turns):
        seconds, length = run_ours(args, options)
        ours += seconds
        lengths.append(length)
        seconds, length = run_trl(args, options, python)
        theirs += seconds
        lengths.append(length)
    ratio = statistics.median(theirs) / statistics.median(ours)
    for name, found in (("grpo.py", ours), (f"TRL {TRL}", theirs)):
        low, high = min(found), max(found)
        print(f"{name}: {statistics.median(found):.2f} s an iteration ({low:.2f} to {high:.2f})")
    print(f"TRL / grpo.py: {ratio:.2f}; mean response lengths, in turn: ", end="")
    print(", ".join(f"{length:.1f}" for length in lengths))


if __name__ == "__main__":
    main(tyro.cli(Args))
