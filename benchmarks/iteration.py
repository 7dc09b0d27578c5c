"""How much of an iteration's time do its engines need, and where does the rest go?

    python -m benchmarks.iteration --script vineppo
    torchrun --nproc-per-node 2 -m benchmarks.iteration --script ppo

    efficiency = (vLLM alone + passes on packed batches) / wall time of the iteration

vLLM alone: each of the iteration's requests is repeated just after the iteration has made it, with
the same seed and weights and an empty prefix cache. Passes on packed batches: after the run, the
iteration's forward, backward and optimizer passes are repeated, each on as many real tokens in rows
of one length, so without padding. All is in one process and the same minutes, so that a busy
machine slows all parts alike. Medians over iterations without the first two, which warm the engines
up, and without evaluations and checkpoints.
"""

import functools
import importlib
import os
import shutil
import statistics
import tempfile
import time
from typing import Literal

import torch
import tyro

from common import engines, ranks, run, sampling

WARM_UP = 2


class Recorder:
    """Sits between a script and its engines, and records what it asks of them."""

    def __init__(self, module):
        self.passes: list[tuple] = []  # of this iteration
        self.alone: dict[str, float] = {}  # phase -> seconds
        self.iterations: list[tuple[dict, dict, list]] = []  # (phases, alone, passes)
        generate, log, step = sampling.Sampler.generate, run.Run.log, engines.step
        phase = run.Run.phase

        def generate_twice(sampler, *arguments, **options):
            samples = generate(sampler, *arguments, **options)
            start = time.perf_counter()
            sampler.llm.reset_prefix_cache()
            generate(sampler, *arguments, **options)
            self.alone[self.phase] = time.perf_counter() - start
            return samples

        def set_phase(logger, name):
            self.phase = f"time/{name}"
            phase(logger, name)

        def end_iteration(logger, done, metrics):
            logger.phase("")
            self.iterations.append((dict(logger.phases), self.alone, self.passes))
            self.alone, self.passes = {}, []
            log(logger, done, metrics)

        def record_step(engine, *arguments):
            self.passes.append((engine, step, 0, 0, 0, False, *arguments))
            return step(engine, *arguments)

        def recorded(compute):
            @functools.wraps(compute)
            def compute_and_record(model, input_ids, prompt_lens, mask, *rest, **named):
                sizes = len(mask), int(prompt_lens.sum() + mask.sum()), int(mask.sum())
                grad = torch.is_grad_enabled()
                self.passes.append((model, compute, *sizes, grad, *rest, *named.values()))
                return compute(model, input_ids, prompt_lens, mask, *rest, **named)

            return compute_and_record

        sampling.Sampler.generate, run.Run.log = generate_twice, end_iteration
        run.Run.phase, engines.step = set_phase, record_step
        for name in {"compute_logprobs", "compute_values"} & vars(module).keys():
            setattr(module, name, recorded(getattr(module, name)))


def replay(passes: list[tuple]) -> float:
    """Seconds of these passes on batches without padding: all rows have the mean length."""
    length = round(sum(one[3] for one in passes) / sum(one[2] for one in passes))
    device = next(one[0].device for one in passes if hasattr(one[0], "backward"))  # an engine
    (reference,) = {one[0] for one in passes if not hasattr(one[0], "backward")}
    with engines.lend(reference, device):
        return time_passes(passes, length, device)


def time_passes(passes: list[tuple], length: int, device: torch.device) -> float:
    start = time.perf_counter()
    for model, compute, _, tokens, response_tokens, with_gradient, *rest in passes:
        if not tokens:
            compute(model, *rest)  # a step
            continue
        rows = max(1, round(tokens / length))
        response = min(length - 1, max(1, round(response_tokens / rows)))
        ids = torch.ones(rows, length, dtype=torch.long)
        prompt_lens, mask = torch.full((rows,), length - response), torch.ones(rows, response)
        inputs = [tensor.to(device) for tensor in (ids, prompt_lens, mask)]
        with torch.set_grad_enabled(with_gradient):
            out = compute(model, *inputs, *rest)
        if with_gradient:
            model.set_gradient_accumulation_boundary(True)
            model.backward(out.mean())
    return time.perf_counter() - start


def main(
    script: Literal["vineppo", "ppo", "grpo", "rloo"] = "vineppo",
    model: str = "runs/sft/hf",
    num_iterations: int = 8,
) -> None:
    ranks.set_up()
    module = importlib.import_module(script)
    recorder = Recorder(module)
    # the same folder on all ranks
    folder = ranks.from_main(lambda: os.path.join(tempfile.mkdtemp(), "run"))
    args = module.Args(
        model=model,
        output_dir=folder,
        num_iterations=num_iterations + WARM_UP,
        eval_every=0,
        save_every=num_iterations + WARM_UP,
    )
    module.main(args)
    found = []
    for phases, alone, passes in recorder.iterations[WARM_UP:]:
        packed = min(replay(passes), replay(passes))  # the first one is slowed by new shapes
        phases = {name: seconds - alone.get(name, 0) for name, seconds in phases.items()}
        wall, needed = sum(phases.values()), sum(alone.values()) + packed
        found.append({**phases, "wall": wall, "vLLM alone": sum(alone.values()), "packed": packed})
        found[-1]["efficiency"] = needed / wall
    if ranks.is_main():
        shutil.rmtree(folder)
        medians = {name: statistics.median(one[name] for one in found) for name in found[0]}
        efficiencies = sorted(one["efficiency"] for one in found)
        print(f"{script}: efficiency {medians.pop('efficiency'):.3f} ", end="")
        print(f"({efficiencies[0]:.3f} to {efficiencies[-1]:.3f}); seconds ", end="")
        print(", ".join(f"{name} {seconds:.3f}" for name, seconds in medians.items()))


if __name__ == "__main__":
    tyro.cli(main)
    os._exit(0)
