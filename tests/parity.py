"""Do the sampler and the trainer agree, before and after updates and syncs? Run by the tests:

    torchrun --nproc-per-node 2 -m tests.parity --tied --zero-stage 2

Prints one JSON line on rank 0. The prompts are long enough for the engine's prefix cache to hold
blocks of the old policy's keys and values, if a sync were to leave them there.
"""

import json
import os
import tempfile
from typing import Literal

import torch
import torch.distributed as dist
import tyro
from torch.nn.utils.rnn import pad_sequence

from common import data, run, sampling
from vineppo import compute_logprobs

NUM_UPDATES = 3


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
    rank, _ = run.set_up_processes()
    import deepspeed
    from transformers import AutoModelForCausalLM, AutoTokenizer

    deepspeed.init_distributed(dist_backend="gloo")
    if not model:
        folders = [tempfile.mkdtemp()]
        dist.broadcast_object_list(folders)
        model = folders[0]
        if rank == 0:
            tokenizer = data.make_chain_tokenizer()
            config = data.make_chain_model_config(tokenizer)
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
    sampler = sampling.Sampler(model, dtype, 512, 0.4, tensor_parallel_size)
    tokenizer = AutoTokenizer.from_pretrained(model)
    trained = run.load_model(model, dtype)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": zero_stage, "stage3_param_persistence_threshold": 0},
        "bf16": {"enabled": dtype == "bfloat16"},
        "optimizer": {"type": "AdamW", "params": {"torch_adam": True}},
    }
    engine, *_ = deepspeed.initialize(
        model=trained, model_parameters=trained.parameters(), config=config
    )
    engine.eval()
    generator = torch.Generator().manual_seed(rank)
    some_prompts = torch.randint(2, len(tokenizer), (4, 300), generator=generator).tolist()

    def sample(seed: int, prompts=some_prompts, **options) -> list[list[sampling.Sample]]:
        options = {"n": 4, "temperature": 0.7, "top_p": 1.0, "logprobs": True, **options}
        return sampler.generate(prompts, max_tokens=[20] * 4, seed=seed, **options)

    def batch_of(groups):
        rows = [(p, s) for p, group in zip(some_prompts, groups, strict=True) for s in group]
        ids = pad_sequence([torch.tensor(p + s.ids) for p, s in rows], batch_first=True)
        lengths = torch.tensor([len(s.ids) for _, s in rows])
        mask = (torch.arange(int(lengths.max())) < lengths[:, None]).float()
        theirs = pad_sequence([torch.tensor(s.logprobs) for _, s in rows], batch_first=True)
        return (ids, torch.full((len(rows),), 300), mask), theirs

    def gap(groups) -> float:
        inputs, theirs = batch_of(groups)
        with torch.no_grad():
            ours = compute_logprobs(engine, *inputs, temperature=1.0)
        mask = inputs[-1]
        sums = torch.stack([((ours - theirs).abs() * mask).sum().double(), mask.sum().double()])
        dist.all_reduce(sums)
        return (sums[0] / sums[1]).item()

    result = {"start": gap(sample(0)), "stale": [], "synced": [], "grad_norm": []}

    # The seed decides everything; siblings and equal prompts do not share their noise.
    def ids_of(groups):
        return [[tuple(s.ids) for s in group] for group in groups]

    # The same prompt in every request of every rank: all samples of all ranks must differ (but for
    # the short ones). The model is still random, so chance does not make two alike.
    same = [[2 + i % 30 for i in range(300)]] * 4
    seeds = [run.seed_of(seed, "test", rank) for seed in (1, 1, 2)]
    first, again, other = (ids_of(sample(seed, prompts=same)) for seed in seeds)
    everything = run.gather([ids for group in first for ids in group if len(ids) > 5])
    result["reproducible"] = first == again
    result["distinct"] = len(set(everything)) == len(everything) > 8 and first != other
    # A stop string: its ids are cut off, log-probs with them, and the response is finished.
    stopped = [s for group in sample(3, stop="5", n=16) for s in group if s.stopped]
    result["stopped"] = len(stopped)
    for s in stopped:
        assert s.finished and "5" not in tokenizer.decode(s.ids) and len(s.logprobs) == len(s.ids)

    # above 10,000 tokens at temperature 2: none that the tokenizer does not know
    many = sample(4, n=180, temperature=2.0)
    result["largest"] = max(i for group in many for s in group for i in s.ids)
    result["tokens"] = sum(len(s.ids) for group in many for s in group)

    for update in range(NUM_UPDATES):
        inputs, _ = batch_of(sample(update))
        # ranks with unlike work: the first one's head runs in more chunks
        inputs = [tensor.repeat_interleave(9 if rank == 0 else 1, dim=0) for tensor in inputs]
        weights = torch.randn(inputs[-1].shape, generator=generator)
        loss = (compute_logprobs(engine, *inputs, temperature=0.7) * weights).mean()
        engine.set_gradient_accumulation_boundary(True)
        engine.backward(loss)
        result["grad_norm"].append(run.step(engine, 3e-3))
        result["stale"].append(gap(sample(update)))  # the engine still has the old weights
        sampler.sync_weights(engine.module)
        result["synced"].append(gap(sample(update)))

    result["empty"] = sampler.generate([], n=1, temperature=1.0, top_p=1.0, max_tokens=[], seed=0)
    if rank == 0:
        print(json.dumps(result), flush=True)
    os._exit(0)  # engines of both kinds are up; the test wants no wait for their goodbyes


if __name__ == "__main__":
    tyro.cli(main)
