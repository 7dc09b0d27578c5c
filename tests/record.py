"""Runs of the scripts with their real engines, written down for the second computation.

    python -m tests.record FOLDER                                   one rank
    torchrun --standalone --nproc-per-node 2 -m tests.record FOLDER --runs vineppo grpo

It watches the engines, not the scripts: what vLLM was asked and what it answered, and, at each
optimizer step of DeepSpeed, the gradients, the learning rate and the weights before and after. So
it still works when the scripts are rewritten. One process for all runs: the engines start once.

FOLDER/problems and FOLDER/model/hf, which the runs start from, are those of `make_start`; what was
written down comes to FOLDER/<run>.<rank>.pt, the run itself to FOLDER/<run>.
"""

import json
import os
import random
import runpy
import shlex
import shutil
import sys
import time

import torch
import tyro

from tests.conftest import ROOT, call

FILLERS = ["so", "now", "then", "ok", "well", "next", "here"]
# Limits that matter: a chain of three operations is complete after 26 tokens, but for its EOS; the
# prompt of a chain of six is too long for 40 - 26 tokens.
LENGTHS = ["--max-model-len", "40", "--max-response-len", "26", "--top-p", "0.95"]
RL = [*LENGTHS, "--temperature", "1.1", "--max-grad-norm", "0.4", "--micro-batch-tokens", "150"]
RL += ["--eval-problems", "5", "--eval-rounds", "3", "--eval-temperature", "0.5"]
LOOP = [*RL, "--num-prompts", "6", "--group-size", "5", "--minibatch-size", "10"]
LOOP += ["--num-iterations", "3", "--learning-rate", "3e-4", "--warmup-fraction", "0.3"]
LOOP += ["--eval-every", "2", "--save-every", "1", "--kl-coef", "0.05", "--clip-coef", "0.05"]
CRITIC = ["--critic-learning-rate", "1e-2", "--gamma", "0.99", "--gae-lambda", "0.9"]
CRITIC += ["--clip-coef-value", "0.05"]
RESTEM = ["--num-iterations", "3", "--num-prompts", "6", "--group-size", "8", "--eval-every", "4"]
RESTEM += ["--minibatch-size", "5", "--update-epochs", "2", "--learning-rate", "5e-4"]
RESTEM += ["--eval-rounds", "9", "--warmup-fraction", "0.3"]
DPO = [
    "--num-prompts",
    "99",
    "--warmup-fraction",
    "0.3",
    "--group-size",
    "8",
    "--minibatch-size",
    "6",
    "--max-pairs",
    "7",
]
DPO += ["--update-epochs", "2", "--learning-rate", "1e-3", "--eval-every", "2", "--beta", "0.2"]
DPO += ["--penalty", "3", "--save-every", "1"]
SFT = ["--num-epochs", "0.0134", "--batch-size", "10", "--micro-batch-tokens", "150"]
SFT += ["--learning-rate", "1e-3", "--max-grad-norm", "0.4", "--max-model-len", "48"]
SFT += ["--eval-every", "3", "--eval-problems", "5", "--save-every", "1"]
EVALUATE = [*LENGTHS, "--temperature", "0.5", "--rounds", "3", "--num-problems", "9"]

# The fork with all that is its own; some responses go on behind the answer.
FLAGS = ["--k", "2", "--no-share-rollouts", "--reuse-responses"]
FLAGS += ["--max-steps-valued", "2", "--smoothing", "0.4", "--stop", "\nthus"]
RUNS = {
    "vineppo": ["vineppo.py", *LOOP, "--k", "3"],
    "vineppo_cheap": ["experiments/vineppo_cheap.py", *LOOP, *FLAGS],
    "ppo": ["ppo.py", *LOOP, *CRITIC],
    "grpo": ["grpo.py", *LOOP],
    "rloo": ["rloo.py", *LOOP],
    "restem": ["restem.py", *RL, *RESTEM],
    "dpo_pos": ["dpo_pos.py", *RL, *DPO],
    "sft": ["sft.py", *SFT],
    "evaluate": ["evaluate.py", *EVALUATE],
}


def write_problems(folder: str) -> None:
    """Chains of two or three operations modulo 10, told by a demonstrator who makes mistakes; the
    answer is what he finds on one of two tries that differ, so that responses are right and wrong.
    Behind it a solution ends at once, after a newline, or after a word on a line of its own."""
    rng = random.Random(0)
    facts = [(op, a, b) for op in "+-" for a in range(10) for b in range(2, 6)]
    weak = {fact: rng.choice((1, 2)) for fact in rng.sample(facts, 40)}
    seen: set[str] = set()

    def tell(start: int, operations: list[tuple[str, int]]) -> tuple[str, str]:
        lines, digit = [], start
        for op, b in operations:
            offset = weak.get((op, digit, b), 0) if rng.random() < 0.5 else 0
            result = ((digit + b if op == "+" else digit - b) + offset) % 10
            lines.append(f"{rng.choice(FILLERS)} {digit}{op}{b}={result} {rng.choice(FILLERS)}")
            digit = result
        tail = rng.choice(("", "\n", "\nthus"))
        return str(digit), "\n".join([*lines, f"#### {digit}{tail}"])

    def make(length: int, learnt: bool = False) -> dict[str, str]:
        while True:
            start = rng.randrange(10)
            operations = [(rng.choice("+-"), rng.randrange(2, 6)) for _ in range(length)]
            prompt = str(start) + "".join(f"{op}{b}" for op, b in operations) + "=?\n"
            (answer, solution), (other, _) = (tell(start, operations) for _ in range(2))
            if prompt not in seen and (answer != other or learnt):
                seen.update([] if learnt else [prompt])
                prompt = rng.choice(("", "so ")) * learnt + prompt
                return {"prompt": prompt, "answer": answer, "solution": solution}

    splits = {"train": [make(length) for length in (2, 2, 3, 2, 3, 3, 2, 3, 2, 6)]}
    twin = dict(splits["train"][1])  # the same words, another answer: another state
    twin["answer"] = str((int(twin["answer"]) + 1) % 10)
    splits["train"].append(twin)
    # almost those of the training: who learns them gets better here, as RestEM's walk must
    near = [row | {"prompt": "so " + row["prompt"]} for row in splits["train"][:9]]
    splits["validation"] = [make(6), *(row for row in near if len(row["prompt"]) < 13), make(2)]
    splits["test"] = [make(length) for length in (2, 3, 6, 2, 2, 3, 2, 2, 3, 2, 2, 3)]
    splits["sft"] = [make(2 + i % 3, learnt=True) for i in range(3000)]
    os.makedirs(folder, exist_ok=True)
    for name, rows in splits.items():
        with open(os.path.join(folder, f"{name}.jsonl"), "w") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)


def make_start(folder: str) -> None:
    """FOLDER/problems, and FOLDER/model/hf, a model that has learnt from them."""
    from tasks import chain

    problems, init = os.path.join(folder, "problems"), os.path.join(folder, "init")
    write_problems(problems)
    tokenizer = chain.make_tokenizer()
    model = chain.make_model(tokenizer, seed=0)
    model.save_pretrained(init)
    tokenizer.save_pretrained(init)
    options = ["--task", "jsonl", "--data-dir", problems, "--model", init, "--eval-every", "0"]
    options += ["--output-dir", os.path.join(folder, "model"), "--max-model-len", "48"]
    call("sft.py", *options, "--num-epochs", "2", "--batch-size", "16")


ASKED = ("n", "temperature", "top_p", "top_k", "min_p", "max_tokens", "stop", "seed")
ASKED += ("presence_penalty", "frequency_penalty", "repetition_penalty", "ignore_eos")


def watch_vllm(events: list[dict]) -> None:
    """The engine starts once; its log-probs are asked for in every call, to see its weights."""
    from vllm import LLM

    create, generate, made = LLM.__init__, LLM.generate, []

    def create_once(self, *arguments, **options):
        if made:
            self.__dict__ = made[0]
            self.apply_model(lambda model: vars(model).pop("compute_logits"))  # the last Sampler's
            self.collective_rpc("reload_weights")  # those on the disk
            self.reset_prefix_cache()
        else:
            create(self, *arguments, **options)
            made.append(self.__dict__)

    def record(self, prompts, params, **options):
        asked = [{name: getattr(one, name) for name in ASKED} for one in params]
        wanted = [one.logprobs is not None for one in params]
        for one in params:
            one.logprobs = 0
        seeds, start = torch.initial_seed(), time.perf_counter()
        requests = generate(self, prompts, params, **options)
        outputs = [
            [
                {
                    "ids": list(one.token_ids),
                    "logprobs": [
                        at[i].logprob for i, at in zip(one.token_ids, one.logprobs, strict=True)
                    ],
                    "finish": one.finish_reason,
                    "stop": one.stop_reason,
                }
                for one in request.outputs
            ]
            for request in requests
        ]
        for request, keep in zip(requests, wanted, strict=True):
            for one in request.outputs:
                one.logprobs = one.logprobs if keep else None
        prompt_ids = [list(prompt["prompt_token_ids"]) for prompt in prompts]
        asked = [one | {"prompt": ids} for one, ids in zip(asked, prompt_ids, strict=True)]
        event = {"kind": "generate", "asked": asked, "seed": seeds, "outputs": outputs}
        events.append(event | {"time": start})
        return requests

    LLM.__init__, LLM.generate = create_once, record


def watch_deepspeed(events: list[dict]) -> None:
    from deepspeed.runtime.engine import DeepSpeedEngine
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad

    step = DeepSpeedEngine.step

    def weights_of(engine) -> dict[str, torch.Tensor]:
        named, found = engine.module.named_parameters(), {}
        for name, parameter in named:
            whole = safe_get_full_fp32_param(parameter)
            found[name] = (parameter if whole is None else whole).detach().float().clone()
        return found

    def record(self, *arguments, **options):
        named = dict(self.module.named_parameters())
        event = {"kind": "step", "engine": id(self), "lr": self.optimizer.param_groups[0]["lr"]}
        event["grads"] = {n: safe_get_full_grad(p).float().clone() for n, p in named.items()}
        event["before"] = weights_of(self)
        step(self, *arguments, **options)
        events.append(event | {"after": weights_of(self)})

    DeepSpeedEngine.step = record


def make_killed(whole: str, folder: str) -> None:
    """What the run would have left if a kill had come behind its middle checkpoint, in the middle
    of a line."""
    shutil.copytree(whole, folder, symlinks=True)
    found = os.listdir(f"{folder}/checkpoints")
    saved = sorted(name for name in found if name.startswith("iteration_"))
    later = {name.split("_")[1] for name in saved[len(saved) // 2 :]}
    for name in found:
        if name.split("_")[1] in later:
            shutil.rmtree(f"{folder}/checkpoints/{name}")
    for name in ("hf", "best", "finished"):
        os.remove(f"{folder}/{name}")
    for name in ("metrics.jsonl", "episodes.jsonl"):
        if os.path.exists(f"{folder}/{name}"):
            with open(f"{folder}/{name}", "a") as file:
                file.write('{"iteration": 1')


def main(
    folder: tyro.conf.Positional[str],
    runs: tuple[str, ...] = tuple(RUNS),
    flags: str = "",
) -> None:
    """`flags`: of every run, behind its own; as for a shell."""
    from common import ranks

    rank, _, _ = ranks.set_up()
    problems, model = os.path.join(folder, "problems"), os.path.join(folder, "model/hf")
    common = ["--task", "jsonl", "--data-dir", problems, "--model", model, "--seed", "4"]
    events: list[dict] = []
    watch_vllm(events)
    watch_deepspeed(events)
    for name in runs:
        output = os.path.join(folder, name)
        place = ["--output", f"{output}.json"] if name == "evaluate" else ["--output-dir", output]
        place += [] if name == "evaluate" else ["--keep-checkpoints", "99"]
        words = sys.argv = [*RUNS[name], *common, *place, *shlex.split(flags)]
        events.clear()
        runpy.run_path(os.path.join(ROOT, words[0]), run_name="__main__")
        made = {"words": words, "events": events, "end": time.perf_counter()}
        torch.save(made, f"{output}.{rank}.pt")
        if name != "evaluate":  # once more from a checkpoint in its middle
            if rank == 0:
                make_killed(output, f"{output}.resumed")
            torch.distributed.barrier()
            sys.argv = [*words, "--output-dir", f"{output}.resumed", "--resume", "auto"]
            runpy.run_path(os.path.join(ROOT, words[0]), run_name="__main__")


if __name__ == "__main__":
    tyro.cli(main)
    os._exit(0)  # engines of both kinds are up; the tests want no wait for their goodbyes
