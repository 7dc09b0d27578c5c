"""Do the sampler and the trainer agree, before and after updates and syncs? Run by the tests:

    torchrun --nproc-per-node 2 -m tests.parity --tied --zero-stage 2

Prints one JSON line on rank 0. The prompts are long enough for the engine's prefix cache to hold
blocks of the old policy's keys and values, if a sync were to leave them there.
"""

import json
import os
import tempfile
from dataclasses import replace
from typing import Literal

import torch
import torch.distributed as dist
import tyro

from common import batches, engines, ranks, sampling
from tasks import chain
from vineppo import Args, compute_logprobs

NUM_UPDATES = 2


def main(
    tied: bool = False,
    zero_stage: Literal[0, 2, 3] = 0,
    dtype: Literal["float32", "bfloat16"] = "float32",
    padding: int = 0,
    tensor_parallel_size: int = 1,
    model: str = "",
) -> None:
    """`padding`: rows of the embeddings beyond the tokenizer's tokens. `model`: a real checkpoint
    instead of a small random Llama."""
    rank, _, device = ranks.set_up()
    assert ranks.from_main(dist.get_rank) == 0
    from transformers import AutoModelForCausalLM

    if not model:
        folders = [tempfile.mkdtemp()]
        dist.broadcast_object_list(folders)
        model = folders[0]
        if rank == 0:
            tokenizer = chain.make_tokenizer()
            config = chain.make_model_config(tokenizer)
            config.tie_word_embeddings = tied
            config.vocab_size += padding
            if tensor_parallel_size > 1:  # three heads cannot be shared by two
                config.hidden_size, config.num_attention_heads = 128, 4
                config.num_key_value_heads = 4
            config.max_position_embeddings = 512
            torch.manual_seed(0)
            AutoModelForCausalLM.from_config(config).save_pretrained(model)
            tokenizer.save_pretrained(model)
        dist.barrier()
    args = Args(model=model, dtype=dtype, max_model_len=512, gpu_memory_utilization=0.4)
    args = replace(args, tensor_parallel_size=tensor_parallel_size, zero_stage=zero_stage)
    tokenizer = engines.load_tokenizer(args)
    sampler = sampling.Sampler(args, tokenizer)
    # as from_config gives it to sft.py: its dropout must not be on in the update
    engine = engines.initialize(engines.load_model(args, tokenizer).train(), args)
    assert not any(module.training for module in engine.module.modules())
    generator = torch.Generator().manual_seed(0)
    some_prompts = torch.randint(2, len(tokenizer), (8, 300), generator=generator).tolist()

    def sample(seed: int, prompts=some_prompts, **options) -> list[list[sampling.Sample]]:
        options = {"n": 4, "temperature": 0.7, "logprobs": True, **options}
        return sampler.generate(prompts, max_tokens=[20] * 8, seed=(seed, "test"), **options)

    def batch_of(groups) -> batches.Batch:
        prompts = [p for p, group in zip(some_prompts, groups, strict=True) for _ in group]
        responses = [s.ids for group in groups for s in group]
        return batches.Batch(prompts, responses, 4096, device)

    def gap(groups) -> float:
        batch = batch_of(groups)
        ours = batch.map(lambda *x: compute_logprobs(engine, *x, temperature=0.7))
        samples = [s for group in groups for s in group]
        return sampling.measure_gap(samples, ours, batch.response_mask)

    result = {"start": gap(sample(0)), "stale": [], "synced": [], "grad_norm": []}

    # The seed decides everything; siblings and equal prompts do not share their noise.
    def ids_of(groups):
        return [[tuple(s.ids) for s in group] for group in groups]

    # The same prompt in every request of every rank: all samples of all ranks must differ (but for
    # the short ones). The model is still random, so chance does not make two alike.
    same = [[2 + i % 30 for i in range(300)]] * 8
    first, again, other = (ids_of(sample(seed, prompts=same)) for seed in (1, 1, 2))
    everything = [ids for group in first for ids in group if len(ids) > 5]
    result["reproducible"] = first == again
    result["distinct"] = len(set(everything)) == len(everything) > 8 and first != other
    # A stop string: its ids are cut off, log-probs with them, and the response is finished.
    sampler.args = replace(args, stop="5")
    stopped = [s for group in sample(3, n=16) for s in group if s.stopped]
    sampler.args = args
    result["stopped"] = len(stopped)
    for s in stopped:
        assert s.finished and "5" not in tokenizer.decode(s.ids) and len(s.logprobs) == len(s.ids)

    # above 10,000 tokens at temperature 2: none that the tokenizer does not know
    many = sample(4, n=180, temperature=2.0)
    result["largest"] = max(i for group in many for s in group for i in s.ids)
    result["tokens"] = sum(len(s.ids) for group in many for s in group)

    for update in range(NUM_UPDATES):
        inputs = batch_of(sample(update)).take(list(range(rank, 32, dist.get_world_size())))
        # ranks with unlike work: the first one's head runs in two chunks
        inputs = [tensor.repeat_interleave(6 if rank == 0 else 1, dim=0) for tensor in inputs]
        assert (inputs[-1].sum() > 1024) == (rank == 0)
        weights = torch.randn(inputs[-1].shape, generator=generator)
        loss = (compute_logprobs(engine, *inputs, temperature=0.7) * weights).mean()
        engine.set_gradient_accumulation_boundary(True)
        engine.backward(loss)
        result["grad_norm"].append(engines.step(engine, 3e-3))
        result["stale"].append(gap(sample(update)))  # the engine still has the old weights
        sampler.sync_weights(engine.module)
        result["synced"].append(gap(sample(update)))

    result["empty"] = sampler.generate([], n=1, max_tokens=[], temperature=1.0, seed=(0,))
    # fewer prompts than ranks
    result["few"] = len(sampler.generate(some_prompts[:1], 2, [5], temperature=1.0, seed=(0,))[0])
    if rank == 0:
        print(json.dumps(result), flush=True)
    os._exit(0)  # engines of both kinds are up; the test wants no wait for their goodbyes


if __name__ == "__main__":
    tyro.cli(main)
