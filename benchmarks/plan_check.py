"""Compares the peaks of memory that benchmarks/plan.py plans with those of real updates, on a CPU.

    python -m benchmarks.plan_check           every setting, each in a process of its own

A Llama of ten million random parameters goes through a script's steps, without the sampler:
DeepSpeed's engine with the scripts' settings, log-probs without gradients, two optimizer steps of
two micro-batches each, by the scripts' own functions. PyTorch's profiler sees every allocation of
tensor memory; the peak of their sum is what a GPU would have to hold. Of several ranks only rank 0
runs, with PyTorch's fake process group, whose collectives return at once (with real buffers).
"""

import json
import os
import subprocess
import sys
import tempfile

import torch
import tyro

from benchmarks import plan

SIZES = {"hidden_size": 256, "num_hidden_layers": 8, "num_attention_heads": 8}
SIZES |= {"intermediate_size": 704, "num_key_value_heads": 4, "vocab_size": 16_000}
SETTINGS = [  # name, tied, dtype, ZeRO, ranks, critic, tokens of a micro-batch
    ("tied", True, "float32", 0, 1, False, 1024),
    ("untied", False, "float32", 2, 1, False, 1024),
    ("with critic", True, "float32", 0, 1, True, 1024),
    ("with critic, rank 0 of 4", False, "float32", 2, 4, True, 1024),
    ("tied", True, "bfloat16", 0, 1, False, 1024),
    ("untied, rank 0 of 4", False, "bfloat16", 2, 4, False, 1024),
    ("untied, few tokens", False, "bfloat16", 0, 1, False, 32),
    ("tied, few tokens, rank 0 of 4", True, "float32", 2, 4, False, 32),
]


def make_setting(folder: str, tied: bool, dtype: str, zero: int, ranks: int, critic: bool, tokens):
    """The plan's setting for a model whose config this writes to `folder`."""
    from transformers import LlamaConfig

    LlamaConfig(**SIZES, tie_word_embeddings=tied).save_pretrained(folder)
    length = min(tokens, 256)
    lengths = tokens, length, length * 3 // 4
    return plan.Setting(folder, dtype, zero, ranks, *lengths, 0.0, critic, device="cpu")


def planned(setting: plan.Setting) -> int:
    """Bytes without a sampler."""
    memory = plan.plan_memory(setting, gpu_memory=0)
    parts = [{n: x for n, x in p.items() if "vLLM" not in n} for p in memory.values()]
    return int(max(sum(p.values()) for p in parts) * plan.GIB)


def measure(s: plan.Setting) -> int:
    """Bytes that tensors of this process hold at the peak."""
    size = {"WORLD_SIZE": s.ranks, "LOCAL_WORLD_SIZE": s.ranks, "RANK": 0, "LOCAL_RANK": 0}
    os.environ.update({name: str(value) for name, value in size.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="1")  # read, not used
    from torch.testing._internal.distributed.fake_pg import FakeStore

    import ppo
    import vineppo
    from common import engines, ranks

    torch.distributed.init_process_group("fake", rank=0, world_size=s.ranks, store=FakeStore())
    ranks.set_up()
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        update(s, vineppo, ppo, engines)
    events = profile.profiler.kineto_results.events()
    sizes = [(e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"]
    now = peak = 0
    for _, change in sorted(sizes, key=lambda x: x[0]):
        now += change
        peak = max(peak, now)
    return peak


def update(s: plan.Setting, vineppo, ppo, engines) -> None:
    args = vineppo.Args(zero_stage=s.zero_stage, dtype=s.dtype)
    ref_model = plan.make_model(s.model, s.dtype, critic=False)
    trained = [
        engines.initialize(plan.make_model(s.model, s.dtype, critic), args)
        for critic in [False, True][: 1 + s.critic]
    ]
    rows, length, num_new = s.micro_batch_tokens // s.max_model_len, *s[5:7]
    mask, ids = torch.ones(rows, num_new), torch.randint(SIZES["vocab_size"], (rows, length))
    inputs = ids, torch.full((rows,), length - num_new), mask
    with torch.no_grad():
        old = vineppo.compute_logprobs(trained[0], *inputs, temperature=0.6)
        ref = vineppo.compute_logprobs(ref_model, *inputs, temperature=0.6)
    num_tokens = 2 * rows * num_new
    for _ in range(2):
        for engine, is_last in [(e, last) for e in trained for last in (False, True)]:
            engine.set_gradient_accumulation_boundary(is_last)
            if engine is trained[0]:
                new = vineppo.compute_logprobs(engine, *inputs, temperature=0.6)
                counts = num_tokens, 2 * rows, args.clip_coef, args.kl_coef
                loss, _ = vineppo.compute_policy_loss(new, old, ref, mask, mask, *counts)
            else:
                new = ppo.compute_values(engine, *inputs)
                loss, _ = ppo.compute_value_loss(new, old, ref, mask, num_tokens, 0.2)
            engine.backward(loss * s.ranks)
            del new, loss
            if is_last:
                engines.step(engine, 1e-5)
    engines.weight_distance(trained[0].module, ref_model)


def main(setting: str = "") -> None:
    """setting: measure this one, a JSON list, in this process and print its bytes"""
    if setting:
        print(f"peak {measure(plan.Setting(*json.loads(setting)))}")
        return
    print("| setting | dtype | ZeRO | planned, MB | measured, MB | ratio | without the bucket |")
    print("|---|---|---|---|---|---|---|")
    for name, *choice in SETTINGS:
        with tempfile.TemporaryDirectory() as folder:
            setting = make_setting(folder, *choice)
            command = [sys.executable, "-m", "benchmarks.plan_check", "--setting"]
            done = subprocess.run(
                [*command, json.dumps(setting)],
                cwd=plan.ROOT,
                check=True,
                stdout=subprocess.PIPE,
                text=True,
            )
            measured = int(done.stdout.split("peak ")[-1])
            expected = planned(setting)
        bucket = plan.BUCKET * (2 if setting.dtype == "bfloat16" else 4) * (setting.zero_stage == 2)
        ratio, without = expected / measured, (expected - bucket) / (measured - bucket)
        print(
            f"| {name} | {setting.dtype} | {setting.zero_stage} | {expected / 1e6:,.0f} | "
            f"{measured / 1e6:,.0f} | {ratio:.3f} | {without:.3f} |",
            flush=True,
        )


if __name__ == "__main__":
    tyro.cli(main)
