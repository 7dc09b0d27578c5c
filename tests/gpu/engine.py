"""The sampler's engine: it starts, sleeps, wakes, takes new weights, and agrees with the trainer.

    python -m tests.gpu.engine [--model FOLDER] [--dtype bfloat16]

On a CPU, where nothing sleeps, the rows about memory are left out. Prints a table for docs/gpu.md;
the exit status is 1 where a row is not as expected.
"""

import os
import sys
import tempfile
import time
from typing import Literal

import torch
import torch.distributed as dist
import tyro

from common import batches, engines, ranks, run, sampling
from tasks import chain
from tests.gpu.trainer import TEMPERATURE, Row, at_most, print_table
from vineppo import Args, compute_logprobs

SHARE = 0.4  # of the GPU's memory, for vLLM


def make_model(folder: str) -> str:
    """A random Llama that knows the tokens of the embedded task."""
    from transformers import AutoModelForCausalLM

    tokenizer = chain.make_tokenizer()
    config = chain.make_model_config(tokenizer)
    config.max_position_embeddings = 512
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def main(model: str = "", dtype: Literal["float32", "bfloat16"] = "bfloat16") -> None:
    rank, _, device = ranks.set_up()
    model = model or ranks.from_main(lambda: make_model(tempfile.mkdtemp()))
    dist.barrier()
    args = Args(model=model, dtype=dtype, max_model_len=512, gpu_memory_utilization=SHARE)
    tokenizer = engines.load_tokenizer(args)
    rows: list[Row] = []

    def free() -> int:
        if device.type != "cuda":
            return 0
        torch.cuda.synchronize(device)
        return torch.cuda.mem_get_info(device)[0]

    start = time.perf_counter()
    sampler = sampling.Sampler(args, tokenizer)
    # a CPU's engine keeps its memory, but the calls and their order are tried there too
    sampler.on_gpu = True
    rows.append(Row("seconds of the engine's start", time.perf_counter() - start, "any", True))
    engine = engines.initialize(engines.load_model(args, tokenizer), args)
    sampler.sync_weights(engine.module)
    words = [f"{a}+{b}=?\n" for a in range(4) for b in range(8)]
    prompts = [tokenizer(word)["input_ids"] for word in words]

    def sample(seed: int) -> list[sampling.Sample]:
        limits = [200] * len(prompts)
        groups = sampler.generate(prompts, 8, limits, TEMPERATURE, (seed,), logprobs=True)
        return [sample for group in groups for sample in group]

    def measure(seed: int, what: str) -> list[sampling.Sample]:
        samples = sample(seed)
        repeated = [prompt for prompt in prompts for _ in range(8)]
        batch = batches.Batch(repeated, [s.ids for s in samples], 8192, device)
        ours = batch.map(lambda *x: compute_logprobs(engine, *x, TEMPERATURE))
        gap = sampling.measure_gap(samples, ours, batch.response_mask)
        rows.append(at_most(f"gap {what}", gap, run.MAX_SAMPLER_GAP[dtype]))
        return samples

    def update() -> None:
        inputs = batches.Batch(prompts, prompts, 8192, device).take(list(range(len(prompts))))
        engine.set_gradient_accumulation_boundary(True)
        engine.backward(-compute_logprobs(engine, *inputs, TEMPERATURE).mean())
        engines.step(engine, 1e-3)

    first = measure(0, "at the start")
    again = sample(0)
    same = [s.ids for s in first] == [s.ids for s in again]
    rows.append(Row("the same seed samples the same", float(same), "1", same))
    start = time.perf_counter()
    tokens = sum(len(s.ids) for s in sample(1))
    speed = tokens / (time.perf_counter() - start)
    rows.append(Row("tokens a second, all ranks, 256 requests", speed, "above 0", speed > 0))
    for number in range(3):
        awake = free()
        sampler.sleep()
        if device.type == "cuda":
            freed = (free() - awake) / (SHARE * torch.cuda.mem_get_info(device)[1])
            rows.append(Row("of vLLM's share, freed by sleep", freed, "0.8 to 1", freed >= 0.8))
        update()
        sampler.wake(engine.module)
        measure(2 + number, f"after sleep, update and wake {number + 1}")
    if rank == 0:
        print_table([row._replace(what=f"{dtype}: {row.what}") for row in rows])
        sys.stdout.flush()
    os._exit(0 if all(row.is_as_expected for row in rows) else 1)  # no wait for goodbyes


if __name__ == "__main__":
    tyro.cli(main)
