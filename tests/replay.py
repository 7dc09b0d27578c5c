"""vineppo.py on recorded episodes, to compare what any number of ranks makes of them. Run by tests:

    python -m tests.replay --record --file FILE --model MODEL          samples, and writes them down
    torchrun --nproc-per-node 2 -m tests.replay --file FILE ...       reads them, does not sample

Both write the gradients and the loss of every optimizer step to --output.
"""

import os
import pickle
from typing import Literal

import torch
import tyro

import vineppo
from common import run, sampling


class Replay:
    """In place of the sampler, not under test here: the recorded samples of these prompts."""

    recorded: dict[tuple, list[sampling.Sample]]

    def __init__(self, *_):
        pass

    def generate(self, prompt_ids, n, **_):
        return [self.recorded[n, *ids] for ids in prompt_ids]

    def sleep(self):
        pass

    def wake(self, model):
        pass


def main(
    file: str,
    output: str,
    model: str,
    record: bool = False,
    micro_batch_tokens: int = 4096,
    zero_stage: Literal[0, 2] = 0,
    guard: bool = False,
) -> None:
    """`guard`: pretend that the second minibatch's ratio exploded, so that its step is skipped."""
    rank, _ = run.set_up_processes()
    if record:
        generate = sampling.Sampler.generate
        recorded: dict[tuple, list[sampling.Sample]] = {}

        def record_samples(self, prompt_ids, n, **options):
            groups = generate(self, prompt_ids, n, **options)
            recorded.update({(n, *p): group for p, group in zip(prompt_ids, groups, strict=True)})
            return groups

        sampling.Sampler.generate = record_samples
    else:
        with open(file, "rb") as stream:
            Replay.recorded = {
                key: [sampling.Sample(*sample) for sample in group]
                for key, group in pickle.load(stream).items()
            }
        sampling.Sampler = Replay

    steps = []
    step = run.step

    def record_step(engine, learning_rate: float) -> float:
        grads = {
            n: p.grad.clone() for n, p in engine.module.named_parameters() if p.grad is not None
        }
        norm = step(engine, learning_rate)
        weights = {n: p.detach().float().clone() for n, p in engine.module.named_parameters()}
        steps.append({"grads": grads, "norm": norm, "weights": weights})
        return norm

    run.step = record_step
    if guard:
        mean_of, compute = run.mean_of, vineppo.compute_policy_loss
        calls = []

        def exploded(*arguments):
            loss, sums = compute(*arguments)
            calls.append(1)
            factor = 100.0 if len(calls) == 2 else 1.0
            return loss, {**sums, "policy/ratio": sums["policy/ratio"] * factor}

        def checked(updates):
            assert [u["policy/skipped"] for u in updates] == [0, 1, 0, 0], updates
            assert "policy/grad_norm" not in updates[1]
            return mean_of(updates)

        vineppo.compute_policy_loss, run.mean_of = exploded, checked
    vineppo.main(
        vineppo.Args(
            model=model,
            output_dir=output + ".run",
            num_iterations=1,
            num_prompts=4,
            group_size=3,
            minibatch_size=6,
            micro_batch_tokens=micro_batch_tokens,
            zero_stage=zero_stage,
            temperature=1.9,  # lengths differ, some responses are cut off
            learning_rate=1e-3,
            k=2,
            eval_every=0,
            kl_coef=0.1,
        )
    )
    if rank == 0:
        torch.save(steps, output)
        if record:
            with open(file, "wb") as stream:
                plain = {key: [tuple(s) for s in group] for key, group in recorded.items()}
                pickle.dump(plain, stream)


if __name__ == "__main__":
    tyro.cli(main)
    os._exit(0)
