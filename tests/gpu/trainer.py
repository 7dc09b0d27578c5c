"""The trainer without vLLM: it computes what is computed here by hand, in the memory of the plan.

    python -m tests.gpu.trainer        on a GPU where PyTorch sees one, else on the CPU; a minute

Needs torch, transformers, tyro and tqdm alone; DeepSpeed's rows are left out where it is not
installed. Prints a table for docs/gpu.md; the exit status is 1 where a row is not as expected.
"""

import copy
import importlib.util
import os
import platform
import sys
import tempfile
import time
from dataclasses import replace
from typing import NamedTuple

import torch
from transformers import PretrainedConfig

from benchmarks import plan
from common import batches, engines, ranks
from vineppo import Args, compute_logprobs

TEMPERATURE = 0.6


class Row(NamedTuple):
    what: str
    found: float
    expected: str
    is_as_expected: bool


def at_most(what: str, found: float, limit: float) -> Row:
    return Row(what, found, f"at most {limit:g}", found <= limit)


def make_model(folder: str, device: torch.device, dtype: str, tied: bool = False):
    """A random Llama: 0.2 million parameters on a CPU, 166 million on a GPU."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    large = device.type == "cuda"
    sizes = dict(hidden_size=1024, num_hidden_layers=8, num_attention_heads=16, vocab_size=32_000)
    sizes |= dict(intermediate_size=2816, num_key_value_heads=16)
    if not large:
        sizes = dict(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=500)
        sizes |= dict(intermediate_size=160, num_key_value_heads=4)
    config = LlamaConfig(**sizes, tie_word_embeddings=tied)
    config.save_pretrained(folder)
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype)).eval()


def make_batch(vocabulary: int, device: torch.device) -> batches.Batch:
    """Five sequences of unlike lengths."""
    generator = torch.Generator().manual_seed(0)

    def draw(length: int) -> list[int]:
        return torch.randint(vocabulary, (length,), generator=generator).tolist()

    prompts, responses = [draw(9), draw(30), draw(4), draw(12), draw(7)], [20, 3, 41, 11, 1]
    return batches.Batch(prompts, [draw(n) for n in responses], 4096, device)


# ---- without DeepSpeed ---------------------------------------------------------------------------


class OnlyAHead(torch.nn.Module):
    """What `engines.score` asks of a model."""

    def __init__(self, head: torch.nn.Module):
        super().__init__()
        self.head, self.config = head, PretrainedConfig()

    def get_output_embeddings(self) -> torch.nn.Module:
        return self.head


def check_head(device: torch.device, dtype: str) -> list[Row]:
    """Log-probs in chunks are those of all logits at once, and so is their gradient."""
    torch.manual_seed(0)
    head = torch.nn.Linear(64, 800, bias=False, device=device, dtype=getattr(torch, dtype))
    hidden = torch.randn(2500, 64, device=device, dtype=head.weight.dtype)  # three chunks
    tokens = torch.randint(800, (2500,), device=device)
    found, expected = hidden.clone().requires_grad_(), hidden.clone().requires_grad_()
    ours = engines.score(OnlyAHead(head), found, tokens, TEMPERATURE)
    logits = head(expected).float() / TEMPERATURE
    theirs = logits.log_softmax(-1).gather(1, tokens[:, None]).squeeze(1)
    ours.sum().backward()
    theirs.sum().backward()
    apart = (found.grad - expected.grad).norm() / expected.grad.norm()
    return [
        at_most(f"{dtype}: log-probs in chunks, largest error", error(ours, theirs), 1e-5),
        at_most(f"{dtype}: their gradient, of its norm", float(apart), 1e-2),
    ]


def error(one: torch.Tensor, other: torch.Tensor) -> float:
    return (one.float() - other.float()).abs().max().item()


@torch.no_grad()
def check_padding(device: torch.device, dtype: str) -> list[Row]:
    """Log-probs of a row are the same alone and beside longer ones."""
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(folder, device, dtype).to(device)
    batch = make_batch(model.config.vocab_size, device)
    together = compute_logprobs(model, *batch.take(list(range(5))), TEMPERATURE)
    alone = [compute_logprobs(model, *batch.take([row]), TEMPERATURE) for row in range(5)]
    limit = {"float32": 1e-4, "bfloat16": 0.1}[dtype]
    apart = error(together, torch.cat(alone))
    return [at_most(f"{dtype}: log-probs with padding and without", apart, limit)]


@torch.no_grad()
def check_lending(device: torch.device, dtype: str) -> list[Row]:
    """A lent model computes on the device; its weights never leave the host, and nothing of them
    stays on the device."""
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(folder, device, dtype)
    batch = make_batch(model.config.vocab_size, device)
    expected = compute_logprobs(
        copy.deepcopy(model).to(device), *batch.take([0, 1]), TEMPERATURE
    ).cpu()
    before, held = [p.data_ptr() for p in model.parameters()], allocated(device)
    with engines.lend(model, device):
        found = compute_logprobs(model, *batch.take([0, 1]), TEMPERATURE).cpu()
        where = {p.device.type for p in model.parameters()}
    back = [p.data_ptr() for p in model.parameters()] == before
    rows = [
        at_most(f"{dtype}: log-probs of a lent model", error(found, expected), 1e-6),
        Row(f"{dtype}: it was on the device, then back", float(back), "1", back),
        at_most(f"{dtype}: bytes that stay on the device", allocated(device) - held, 2**20),
    ]
    assert where == {device.type}
    return rows


def allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


# ---- with DeepSpeed ------------------------------------------------------------------------------


def check_updates(device: torch.device, dtype: str, zero_stage: int) -> list[Row]:
    """Three steps of the engine against AdamW in float32, written out."""
    args = replace(Args(), dtype=dtype, zero_stage=zero_stage)
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(folder, device, dtype)
    plain = copy.deepcopy(model).float().to(device)
    engine = engines.initialize(model, args)
    adam = torch.optim.AdamW(plain.parameters(), lr=1e-4, weight_decay=0.0)
    batch = make_batch(model.config.vocab_size, device)
    start = [p.detach().clone() for p in plain.parameters()]
    for _ in range(3):
        engine.set_gradient_accumulation_boundary(True)
        engine.backward(-compute_logprobs(engine, *batch.take(list(range(5))), TEMPERATURE).mean())
        ours = engines.step(engine, 1e-4)
        (-compute_logprobs(plain, *batch.take(list(range(5))), TEMPERATURE).mean()).backward()
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), args.max_grad_norm)
        adam.step()
        adam.zero_grad()
    pairs = list(zip(engine.module.parameters(), plain.parameters(), strict=True))
    apart = sum(float((a.detach().float() - b).square().sum()) for a, b in pairs) ** 0.5
    moved = sum(float((b - s).square().sum()) for (_, b), s in zip(pairs, start, strict=True))
    engine.destroy()
    limit = {"float32": 1e-3, "bfloat16": 0.5}[dtype]
    name = f"{dtype}, ZeRO {zero_stage}"
    return [
        at_most(f"{name}: gradient norm, relative error", abs(ours / float(norm) - 1), 0.02),
        at_most(f"{name}: weights after three steps, of their way", apart / moved**0.5, limit),
    ]


def check_memory(device: torch.device, zero_stage: int) -> list[Row]:
    """Peak of an update in bfloat16 against the plan, on a GPU; tokens a second beside it."""
    args = replace(Args(), dtype="bfloat16", zero_stage=zero_stage)
    rows, length, new = 16, 512, 384
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    held = allocated(device)
    with tempfile.TemporaryDirectory() as folder:
        engine = engines.initialize(make_model(folder, device, "bfloat16"), args)
        sizes = rows * length, length, new
        setting = plan.Setting(folder, "bfloat16", zero_stage, 1, *sizes, 0.0, critic=False)
        memory = plan.plan_memory(setting, gpu_memory=0)
    planned = max(sum(memory[phase].values()) for phase in ("backward", "step")) * plan.GIB
    inputs = torch.randint(32_000, (rows, length)), torch.full((rows,), length - new)
    inputs = [x.to(device) for x in (*inputs, torch.ones(rows, new))]
    times = []
    for _ in range(6):
        start = time.perf_counter()
        engine.set_gradient_accumulation_boundary(True)
        engine.backward(-compute_logprobs(engine, *inputs, TEMPERATURE).mean())
        engines.step(engine, 1e-5)
        torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    ratio = (torch.cuda.max_memory_allocated(device) - held) / planned
    engine.destroy()
    name, speed = f"bfloat16, ZeRO {zero_stage}", rows * length / sorted(times)[2]
    return [
        Row(f"{name}: peak of an update, of the plan", ratio, "0.8 to 1.1", 0.8 <= ratio <= 1.1),
        Row(f"{name}: tokens a second of an update, 166 M parameters", speed, "above 0", speed > 0),
    ]


def run_checks(device: torch.device) -> list[Row]:
    dtypes = ("float32", "bfloat16")
    checks = [
        check(device, d) for check in (check_head, check_padding, check_lending) for d in dtypes
    ]
    if importlib.util.find_spec("deepspeed"):
        checks += [check_updates(device, d, zero) for d in dtypes for zero in (0, 2)]
        if device.type == "cuda":
            checks += [check_memory(device, zero) for zero in (0, 2)]
    return [row for rows in checks for row in rows]


def describe_machine() -> str:
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    versions = f"PyTorch {torch.__version__}, CUDA {torch.version.cuda}"
    return f"{gpu}, {versions}, Python {platform.python_version()}"


def print_table(rows: list[Row]) -> None:
    print(f"\n{describe_machine()}\n\n| what | found | expected | |\n|---|---|---|---|")
    for row in rows:
        verdict = "" if row.is_as_expected else "**not as expected**"
        print(f"| {row.what} | {row.found:.3g} | {row.expected} | {verdict} |")


def main() -> None:
    _, _, device = ranks.set_up()
    rows = run_checks(device)
    print_table(rows)
    sys.stdout.flush()
    os._exit(0 if all(row.is_as_expected for row in rows) else 1)  # no wait for goodbyes


if __name__ == "__main__":
    main()
