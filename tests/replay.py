"""The scripts on recorded episodes, to compare what numbers of ranks make of them. Run by tests:

    python -m tests.replay --record --folder FOLDER --model MODEL      samples, and writes them down
    torchrun --nproc-per-node 2 -m tests.replay --folder FOLDER ...    reads them, does not sample

For each script, <folder>/<name>/<script> has the gradients and the norm of every optimizer step and
the weights after it, <folder>/<name>/<script>.run the run. One process for all of them: the engines
start once. Each step of a replay starts from the weights that the recorded one started from.
"""

import importlib
import os
import pickle
from types import SimpleNamespace
from typing import Literal

import torch
import tyro
from transformers import AutoModelForCausalLM

from common import engines, grading, ranks, sampling


class Replay(sampling.Sampler):
    """In place of the engine, not under test here: the recorded samples of these prompts."""

    recorded: dict[tuple, list[sampling.Sample]]
    llm = SimpleNamespace(reset_prefix_cache=lambda: None)

    def __init__(self, args, tokenizer):
        self.args, self.tokenizer = args, tokenizer

    def generate(self, prompt_ids, n, max_tokens, temperature, *_, **__):
        return [self.recorded[n, temperature, *ids] for ids in prompt_ids]

    def sleep(self):
        pass

    def wake(self, model):
        pass


def replay_samples(folder: str) -> None:
    with open(os.path.join(folder, "episodes"), "rb") as stream:
        Replay.recorded = {
            key: [sampling.Sample(*sample) for sample in group]
            for key, group in pickle.load(stream).items()
        }
    sampling.Sampler = Replay


# An odd number of responses, and of those of a minibatch: two ranks have unlike numbers of passes.
OPTIONS = dict(num_prompts=5, group_size=3, minibatch_size=5, learning_rate=1e-3, eval_every=0)
OF_SCRIPT = {
    "vineppo": dict(num_iterations=1, kl_coef=0.1, k=2),
    "ppo": dict(num_iterations=1, kl_coef=0.1, gamma=0.99, gae_lambda=0.95),
    "grpo": dict(num_iterations=1, kl_coef=0.1),
    "rloo": dict(num_iterations=1, kl_coef=0.1),
    "restem": dict(num_iterations=1, group_size=8, eval_every=999, update_epochs=3),
    "dpo_pos": dict(group_size=8, update_epochs=1, save_every=1000),
}


def grade_by_sum(tokenizer, samples, answers, rule) -> list[float]:
    """Rewards of both kinds in every group: at a temperature of 1.9 nothing is really right."""
    return [float(sum(sample.ids) % 3 == 0) for sample in samples]


def main(
    folder: str,
    model: str,
    name: str = "recorded",
    record: bool = False,
    micro_batch_tokens: int = 4096,
    zero_stage: Literal[0, 2] = 0,
    scripts: tuple[str, ...] = tuple(OF_SCRIPT),
) -> None:
    ranks.set_up()
    file = os.path.join(folder, "episodes")
    os.makedirs(os.path.join(folder, name), exist_ok=True)
    if record:
        engine = []
        create, generate = sampling.Sampler.__init__, sampling.Sampler.generate
        recorded: dict[tuple, list[sampling.Sample]] = {}

        def create_once(self, *arguments):
            if not engine:
                create(self, *arguments)
                engine.append(self)
            self.__dict__ = engine[0].__dict__
            self.sync_weights(AutoModelForCausalLM.from_pretrained(model))

        def record_samples(self, prompt_ids, n, max_tokens, temperature, *arguments, **options):
            groups = generate(self, prompt_ids, n, max_tokens, temperature, *arguments, **options)
            keys = [(n, temperature, *ids) for ids in prompt_ids]
            for key, group in zip(keys, groups, strict=True):
                recorded.setdefault(key, group)  # the same again for whoever asks again
            return [recorded[key] for key in keys]

        sampling.Sampler.__init__ = create_once
        sampling.Sampler.generate = record_samples
    else:
        replay_samples(folder)

    grading.grade_all = grade_by_sum
    steps, expected = [], []
    step = engines.step

    def record_step(engine, learning_rate: float) -> float:
        named = dict(engine.module.named_parameters())
        grads = {n: p.grad.clone() for n, p in named.items() if p.grad is not None}
        norm = step(engine, learning_rate)
        weights = {n: p.detach().float().clone() for n, p in named.items()}
        if expected:  # the next step starts where the recorded one did
            for name, weight in expected[len(steps)]["weights"].items():
                named[name].data.copy_(weight)
        steps.append({"grads": grads, "norm": norm, "weights": weights})
        return norm

    engines.step = record_step
    for script in scripts:
        module = importlib.import_module(script)
        steps.clear()
        expected[:] = [] if record else torch.load(os.path.join(folder, "recorded", script))
        output = os.path.join(folder, name, script)
        options = OPTIONS | dict(temperature=1.9) | OF_SCRIPT[script]  # ragged, some cut off
        module.main(
            module.Args(
                model=model,
                output_dir=output + ".run",
                micro_batch_tokens=micro_batch_tokens,
                zero_stage=zero_stage,
                **options,
            )
        )
        if ranks.is_main():
            torch.save(steps, output)
    if record:
        with open(file, "wb") as stream:
            plain = {key: [tuple(s) for s in group] for key, group in recorded.items()}
            pickle.dump(plain, stream)


if __name__ == "__main__":
    tyro.cli(main)
    os._exit(0)
