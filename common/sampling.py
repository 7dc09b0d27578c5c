"""vLLM inside the training process: weights are copied in memory, all ranks make every call."""

import os
import random
import sys
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.utils.rnn import pad_sequence

from common import RunError, UsageError, engines, grading, ranks, require
from common.steps import prefix_decoder, tokens_until
from given import weights
from given.model import check_stop

# The engine runs in this process, not in one of its own as by default: it shares our
# torch.distributed world, our memory and our random generators.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # else all ranks bind the same cores
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
# FlashInfer's sampler would be compiled at the first start: for minutes, or in vain without nvcc
os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")


class Sample(NamedTuple):
    ids: list[int]  # EOS included where the model ended on it
    logprobs: list[float]  # of the ids, at the temperature of sampling, before top-p
    finished: bool  # ended by EOS or a stop string, not cut by max_tokens
    stopped: bool  # ended by a stop string; the ids that begin inside it are cut off


class Sampler:
    """One engine for each rank, or for --tensor-parallel-size ranks together."""

    def __init__(self, args, tokenizer):
        """Loads --model, which every rank must find on a disk."""
        self.args, self.tokenizer, self.size = args, tokenizer, args.tensor_parallel_size
        world_size, what = dist.get_world_size(), f"--tensor-parallel-size {self.size}"
        fits = self.size >= 1 and world_size % self.size == 0
        require(fits, f"{what}: must divide the number of ranks, which is {world_size}")
        check_stop(args.stop, tokenizer)
        if self.size > 1:
            name_shared_memory()
        from vllm import LLM  # takes seconds: after the checks of flags

        weights.leave_classes_alone()
        self.on_gpu = torch.cuda.is_available()
        settings = dict(
            model=args.model,
            dtype=engines.dtype_of(args),
            max_model_len=args.max_model_len,
            max_num_seqs=1024,
            max_num_batched_tokens=16_384,
            distributed_executor_backend="external_launcher",
            enforce_eager=not self.on_gpu,
            # of the prefix cache, which holds whole blocks only; a CPU's default is 128 tokens
            block_size=None if self.on_gpu else 32,
            enable_sleep_mode=self.on_gpu,
            gpu_memory_utilization=args.gpu_memory_utilization,
            tensor_parallel_size=self.size,
            use_tqdm_on_load=False,
            seed=0,
            trust_remote_code=args.trust_remote_code,
            load_format="auto" if args.trust_remote_code else "safetensors",
        )
        try:
            self.llm = LLM(**settings)
        except Exception as error:  # of any kind: shown above our line
            what = f"vLLM cannot start with --model {args.model} ({type(error).__name__}, above)"
            hint = "see docs/models.md or, if memory ran out, change --gpu-memory-utilization"
            raise UsageError(f"{what}: {hint}") from error
        self.temperature = 1.0
        self.llm.apply_model(self.scale_logits)
        (self.has_head,) = {*self.llm.apply_model(weights.has_head)}

    def scale_logits(self, model: torch.nn.Module) -> None:
        """Makes the engine's model divide its logits by the temperature itself. So vLLM reports the
        log-probs that the trainer computes: with the temperature, before top-p. Ids beyond the
        tokenizer's (padded embeddings) get no probability."""
        compute_logits, num_tokens = model.compute_logits, engines.count_tokens(self.tokenizer)

        def compute_scaled_logits(hidden_states: torch.Tensor) -> torch.Tensor:
            logits = compute_logits(hidden_states).float().div_(self.temperature)  # (n, V)
            logits[:, num_tokens:] = float("-inf")
            return logits

        model.compute_logits = compute_scaled_logits

    def generate(
        self,
        prompt_ids: list[list[int]],
        n: int,
        max_tokens: list[int],
        temperature: float,
        seed: tuple[int | str, ...],
        logprobs: bool = False,
        progress: bool = False,
    ) -> list[list[Sample]]:
        """`n` samples for each prompt, of at most `max_tokens[i]` tokens; `seed` decides them all.
        Each engine samples for its share of the prompts, then all ranks get all samples."""
        from vllm import SamplingParams, TokensPrompt

        # Requests get no seeds. From a seed s, vLLM gives the n samples the seeds s, s + 1, ..., so
        # neighbouring requests would share their noise; and on a CPU seeded requests crash the
        # engine when it cuts a prefill.
        first = dist.get_rank() // self.size * self.size  # this engine's first rank
        number = ranks.seed_of(*seed, first)
        torch.manual_seed(number)  # for the CPU; on a GPU vLLM uses numpy and random
        np.random.seed(number % 2**32)
        random.seed(number)
        self.temperature = temperature
        params = [
            SamplingParams(
                n=n,
                temperature=1.0,  # see scale_logits
                top_p=self.args.top_p,
                max_tokens=limit,
                stop=[self.args.stop] if self.args.stop else None,
                detokenize=bool(self.args.stop),
                logprobs=0 if logprobs else None,
            )
            for limit in ranks.share(max_tokens, self.size)
        ]
        prompts = [TokensPrompt(prompt_token_ids=i) for i in ranks.share(prompt_ids, self.size)]
        use_tqdm = progress and ranks.is_main() and sys.stderr.isatty()
        requests = self.llm.generate(prompts, params, use_tqdm=use_tqdm) if prompts else []
        groups = [[self.read(one) for one in request.outputs] for request in requests]
        return ranks.gather(groups if dist.get_rank() == first else [])

    def read(self, output) -> Sample:
        ids, stop = list(output.token_ids), self.args.stop
        stopped = bool(stop) and output.stop_reason == stop
        if stopped:  # cut off the tokens that begin inside the stop string
            decode_until = prefix_decoder(ids, self.tokenizer)
            text, _, _ = decode_until(len(ids)).partition(stop)
            kept = tokens_until(len(ids), text, decode_until)
            if decode_until(kept) != text:  # the last one adds only spaces: it goes too
                kept = tokens_until(len(ids), text.rstrip(" "), decode_until)
            ids = ids[:kept]
        logprobs = [at[i].logprob for i, at in zip(ids, output.logprobs or [], strict=False)]
        return Sample(ids, logprobs, output.finish_reason == "stop", stopped)

    def evaluate(
        self,
        problems: list,
        prompt_ids: list[list[int]],
        rule: str,
        seed: int,
        rounds: int = 0,
        temperature: float = 0.0,
        progress: bool = False,
    ) -> list[float]:
        """For each problem the share of right responses out of `rounds` (default --eval-rounds, at
        --eval-temperature); pass@1 is their mean. `rule`: a key of grading.RULES."""
        rounds, heat = rounds or self.args.eval_rounds, temperature or self.args.eval_temperature
        limits, words = [self.args.max_response_len] * len(prompt_ids), (seed, "evaluate")
        groups = self.generate(prompt_ids, rounds, limits, heat, words, progress=progress)
        samples = [sample for group in groups for sample in group]
        answers = [problem.answer for problem in problems for _ in range(rounds)]
        rewards = grading.grade_all(self.tokenizer, samples, answers, rule)
        return [sum(rewards[i : i + rounds]) / rounds for i in range(0, len(rewards), rounds)]

    def wake(self, model: torch.nn.Module) -> None:
        """Gives the engine the weights of `model`, and first, on a GPU, its memory back."""
        if self.on_gpu:
            torch.cuda.empty_cache()  # what the update's activations held
            self.llm.wake_up(tags=["weights"])
        self.sync_weights(model)
        if self.on_gpu:
            self.llm.wake_up(tags=["kv_cache"])

    def sync_weights(self, model: torch.nn.Module) -> None:
        def named():
            for name, parameter in weights.named_weights(model, self.has_head):
                with engines.whole([parameter]):
                    yield from weights.as_saved(model, name, parameter.detach()).items()

        self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": named()})
        if not self.on_gpu:
            self.llm.apply_model(weights.pack_experts)
        self.llm.reset_prefix_cache()  # it holds the old policy's keys and values

    def sleep(self) -> None:
        """Frees the GPU's memory for training: drops weights and cache."""
        if self.on_gpu:
            self.llm.sleep(level=2)


def describe(samples: list[Sample]) -> dict[str, float]:
    """Metrics of the samples: lengths, and how they ended (shares)."""
    tokens = sum(len(sample.ids) for sample in samples)
    if not tokens:
        raise RunError("all responses are empty: each begins with the text of --stop")
    return {
        "rollout/response_length": tokens / len(samples),
        "rollout/unfinished": 1 - sum(sample.finished for sample in samples) / len(samples),
        "rollout/stop_string": sum(sample.stopped for sample in samples) / len(samples),
        "tokens/sample": tokens,
    }


def measure_gap(
    samples: list[Sample], logprobs: torch.Tensor, response_mask: torch.Tensor
) -> float:
    """Mean over response tokens of |log-prob of the sampler - of the trainer (B, T)|."""
    sampled = pad_sequence([torch.tensor(s.logprobs) for s in samples], batch_first=True)
    return (((sampled - logprobs) * response_mask).abs().sum() / response_mask.sum()).item()


def name_shared_memory() -> None:
    """On a CPU the ranks of an engine talk through a file in shared memory. vLLM gives it the same
    name in every run. With the port in the name, it is not that of another run or a killed one."""
    from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed

    name, port = _CPUSHMDistributed.make_group_name, os.environ["MASTER_PORT"]
    _CPUSHMDistributed.make_group_name = staticmethod(lambda group: port + name(group).strip("/"))
