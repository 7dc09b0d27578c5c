"""A rank that is late, or dead, while the others wait for it. Run by the tests:

torchrun --nproc-per-node 2 -m tests.late --seconds 20                  prints `together`
torchrun --nproc-per-node 2 -m tests.late --seconds 20 --patience 5     ends
torchrun --nproc-per-node 2 -m tests.late --dead                        ends, and names rank 1
"""

import os
import signal
import tempfile
import time
from datetime import timedelta

import torch
import torch.distributed as dist
import tyro

from common import engines, ranks
from common.checkpoints import Checkpoints
from tasks import chain
from vineppo import Args, compute_logprobs


def main(seconds: float = 0.0, dead: bool = False, patience: float = 0.0) -> None:
    """`patience`: seconds in place of ranks.PATIENCE."""
    if patience:
        ranks.PATIENCE = timedelta(seconds=patience)
    rank, world_size, device = ranks.set_up()
    tokenizer = chain.make_tokenizer()
    engine = engines.initialize(chain.make_model(tokenizer, seed=1), Args(zero_stage=2))
    folder = ranks.from_main(tempfile.mkdtemp)
    os.makedirs(f"{folder}/checkpoints", exist_ok=True)

    def be_late(where: str) -> None:
        ranks.say(f"{where}: the last rank comes {seconds:g} s late")
        if rank == world_size - 1:
            if dead:
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(seconds)

    be_late("samples and grades")
    assert ranks.gather([rank]) == list(range(world_size))
    be_late("a batch of log-probs")
    inputs = [torch.ones(1, 9, dtype=torch.long), torch.tensor([4]), torch.ones(1, 5)]
    inputs = [tensor.to(device) for tensor in inputs]
    loss = compute_logprobs(engine, *inputs, temperature=1.0).sum()
    ranks.add_up(torch.zeros(1, device=device))  # on GPUs through NCCL
    engine.set_gradient_accumulation_boundary(True)
    engine.backward(loss)
    engines.step(engine, 1e-4)
    be_late("a checkpoint")
    Checkpoints(folder, {}, keep=1).save(1, {"policy": engine}, engine.module, tokenizer)
    dist.barrier()
    ranks.say("together")


if __name__ == "__main__":
    tyro.cli(main)
