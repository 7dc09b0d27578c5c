"""An iteration of grpo.py against one of TRL's GRPOTrainer, on this machine.

    python -m benchmarks.against_trl                                the embedded model
    python -m benchmarks.against_trl --model runs/smollm2 --task gsm8k --data-dir GSM8K ...

Both have the same model, prompts, episodes, epochs and minibatches, in float32, on the CPU. TRL has
its own environment (.venv-trl, made on the first call) and samples by transformers' generate, since
its vLLM mode loads weights in a way that vLLM's CPU backend does not support. Sampling is timed
apart from the rest. The two take turns, so that a busy machine slows both. Printed are medians over
iterations, without each run's first two.
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
from common import data, ranks

WARM_UP = 2
VENV = os.path.join(ROOT, ".venv-trl")
TRL = "1.16.0"
WITHOUT_GPU = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}


@dataclass
class Args:
    model: str = "runs/sft/hf"
    task: str = "chain"
    data_dir: str = ""
    num_iterations: int = 6
    """iterations measured in each run"""
    turns: int = 2
    """runs of each of the two"""
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
        if subprocess.call(pip) != 0:  # as install/install.py does
            subprocess.run([*pip, "--extra-index-url", index], check=True)
        with open(os.path.join(VENV, "installed"), "w"):
            pass
    return python


def run_ours(args: Args, options: dict) -> dict[str, list[float]]:
    """Seconds of each iteration, of its sampling, and the mean response length of each."""
    total = args.num_iterations + WARM_UP
    with tempfile.TemporaryDirectory() as folder:
        flags = {**options, "output_dir": f"{folder}/run", "num_iterations": total}
        flags |= {"eval_every": 0, "save_every": total, "task": args.task, "dtype": "float32"}
        flags |= {"data_dir": args.data_dir, "max_model_len": args.max_model_len}
        command = [sys.executable, os.path.join(ROOT, "grpo.py")]
        for name, value in flags.items():
            command += [f"--{name.replace('_', '-')}", str(value)]
        subprocess.run(command, env=WITHOUT_GPU, check=True, stdout=subprocess.DEVNULL)
        lines = read_metrics(f"{folder}/run")
    return {
        "seconds": [line["time/iteration"] - line.get("time/save", 0) for line in lines],
        "sampling": [line["time/sample"] for line in lines],
        "length": [line["rollout/response_length"] for line in lines],
    }


def run_trl(args: Args, options: dict, python: str) -> dict[str, list[float]]:
    from transformers import AutoTokenizer

    problems = data.load_problems(args.task, "train", args.data_dir)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    lengths = {name: getattr(args, name) for name in ("max_model_len", "max_response_len")}
    problems, _ = data.fit(grpo.Args(**lengths), problems, tokenizer)
    total = args.num_iterations + WARM_UP
    # as grpo.py does
    drawn = ranks.draw(len(problems), 0, total * args.num_prompts, grpo.Args.seed)
    is_folder = os.path.isdir(args.model)
    with tempfile.TemporaryDirectory() as folder:
        job = {
            **options,
            "folder": folder,
            "num_iterations": total,
            "num_responses": args.num_prompts * args.group_size,
            "temperature": grpo.Args.temperature,
            "kl_coef": grpo.Args.kl_coef,
            "model": os.path.abspath(args.model) if is_folder else args.model,
            "prompts": [problems[i].prompt for i in drawn],
            "answers": [problems[i].answer for i in drawn],
        }
        done = subprocess.run(
            [python, os.path.join(ROOT, "benchmarks/trl_worker.py")],
            input=json.dumps(job),
            env=WITHOUT_GPU,
            check=True,
            stdout=subprocess.PIPE,
            text=True,
        )
    return json.loads(done.stdout.split("TRL ")[-1])


def main(args: Args) -> None:
    python = make_venv()
    names = ("model", "num_prompts", "group_size", "minibatch_size", "update_epochs")
    options = {name: getattr(args, name) for name in (*names, "max_response_len")}
    options["learning_rate"] = grpo.Args.learning_rate
    found: dict[str, dict[str, list[float]]] = {"grpo.py": {}, f"TRL {TRL}": {}}
    for _ in range(args.turns):
        turn = run_ours(args, options), run_trl(args, options, python)
        for of_one, result in zip(found.values(), turn, strict=True):
            result["the rest"] = [
                a - b for a, b in zip(result["seconds"], result["sampling"], strict=True)
            ]
            for name, values in result.items():
                of_one.setdefault(name, []).extend(values[WARM_UP:])
    print(f"\n| seconds of an iteration | {' | '.join(found)} | ratio |\n|---|---|---|---|")
    for name in ("seconds", "sampling", "the rest", "length"):
        ours, theirs = (of_one[name] for of_one in found.values())
        shown = [
            f"{statistics.median(x):.2f} ({min(x):.2f} to {max(x):.2f})" for x in (ours, theirs)
        ]
        ratio = statistics.median(theirs) / statistics.median(ours)
        label = {"seconds": "all", "length": "mean response length, tokens"}.get(name, name)
        print(f"| {label} | {' | '.join(shown)} | {ratio:.2f} |")


if __name__ == "__main__":
    main(tyro.cli(Args))
