"""vLLM inside the training process: one engine a rank, weights synced in memory."""

import functools
import os
import random
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from common import require
from common.grading import grade_all
from common.run import count_tokens, gather, seed_of, share, whole
from common.steps import tokens_until

# The engine runs in this process (its default is a process of its own): it shares our
# torch.distributed world, our memory and our random generators.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # or every rank binds the same cores
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")


class Sample(NamedTuple):
    ids: list[int]  # EOS included where the model ended on it
    logprobs: list[float]  # of the ids, temperature 1, no top-p
    finished: bool  # ended by EOS or a stop string, not cut by max_tokens
    stopped: bool  # ended by a stop string; the ids that begin inside it are cut off


class Sampler:
    def __init__(
        self,
        model: str,
        dtype: str,
        max_model_len: int,
        gpu_memory_utilization: float,
        tensor_parallel_size: int = 1,
        trust_remote_code: bool = False,
    ):
        """`model`: a checkpoint folder; it must be loaded on every rank at the same time."""
        ranks, size = dist.get_world_size(), tensor_parallel_size
        require(
            size >= 1 and ranks % size == 0,
            f"--tensor-parallel-size {size}: does not divide the number of ranks, {ranks}",
        )
        if tensor_parallel_size > 1:
            name_shared_memory()
        from vllm import LLM  # it takes seconds, for which a mistyped flag should not wait

        self.on_gpu = torch.cuda.is_available()
        self.llm = LLM(
            model,
            dtype=dtype,
            max_model_len=max_model_len,
            max_num_seqs=1024,
            max_num_batched_tokens=16_384,
            distributed_executor_backend="external_launcher",
            enforce_eager=not self.on_gpu,
            # of the prefix cache, which knows whole blocks only; a CPU's default is 128 tokens
            block_size=None if self.on_gpu else 32,
            enable_sleep_mode=self.on_gpu,
            gpu_memory_utilization=gpu_memory_utilization,
            tensor_parallel_size=tensor_parallel_size,
            use_tqdm_on_load=False,
            seed=0,
            trust_remote_code=trust_remote_code,
            load_format="auto" if trust_remote_code else "safetensors",
        )
        self.tensor_parallel_size = tensor_parallel_size
        self.tokenizer = self.llm.get_tokenizer()
        self.llm.apply_model(
            functools.partial(hide_padding, num_tokens=count_tokens(self.tokenizer))
        )

    def generate(
        self,
        prompt_ids: list[list[int]],
        n: int,
        temperature: float,
        top_p: float,
        max_tokens: list[int],
        seed: int,
        stop: str = "",
        logprobs: bool = False,
        progress: bool = False,
    ) -> list[list[Sample]]:
        """`n` samples for each prompt, at most `max_tokens[i]` tokens each; `seed` decides all of
        them. The ranks of a tensor-parallel engine, each with prompts of its own, must call it
        together and with the same options; the seed of the first of them counts."""
        from vllm import SamplingParams, TokensPrompt

        mine = slice(len(prompt_ids))
        if self.tensor_parallel_size > 1:  # every rank makes every request, and keeps its own
            from vllm.distributed import get_tp_group

            group = get_tp_group()
            asked = [None] * group.world_size
            one = prompt_ids, max_tokens, seed
            dist.all_gather_object(asked, one, group=group.cpu_group)
            first = sum(len(ids) for ids, _, _ in asked[: group.rank_in_group])
            mine = slice(first, first + len(prompt_ids))
            prompt_ids = [ids for of_rank, _, _ in asked for ids in of_rank]
            max_tokens = [limit for _, of_rank, _ in asked for limit in of_rank]
            seed = asked[0][2]

        # No seed on the requests: vLLM gives n samples of one the seeds s, s + 1, ..., so
        # neighbouring requests would share their noise, and on a CPU seeded requests crash the
        # engine when a prefill is cut.
        torch.manual_seed(seed)  # the CPU's sampler; on a GPU vLLM asks numpy and random for seeds
        np.random.seed(seed % 2**32)
        random.seed(seed)
        params = [
            SamplingParams(
                n=n,
                temperature=temperature,
                top_p=top_p,
                max_tokens=limit,
                stop=[stop] if stop else None,
                detokenize=bool(stop),
                logprobs=0 if logprobs else None,
            )
            for limit in max_tokens
        ]
        prompts = [TokensPrompt(prompt_token_ids=ids) for ids in prompt_ids]
        requests = self.llm.generate(prompts, params, use_tqdm=progress) if prompts else []
        return [[self.read(one, stop) for one in request.outputs] for request in requests[mine]]

    def read(self, output, stop: str) -> Sample:
        ids = list(output.token_ids)
        stopped = bool(stop) and output.stop_reason == stop
        if stopped:  # without the tokens that begin inside the stop string
            decode = functools.partial(self.tokenizer.decode, skip_special_tokens=True)
            text, _, _ = decode(ids).partition(stop)
            kept = tokens_until(ids, text, decode)
            if decode(ids[:kept]) != text:  # does the last one add spaces alone? then it goes too
                kept = tokens_until(ids, text.rstrip(" "), decode)
            ids = ids[:kept]
        logprobs = [
            position[i].logprob for i, position in zip(ids, output.logprobs or [], strict=False)
        ]
        return Sample(ids, logprobs, output.finish_reason == "stop", stopped)

    def sync_weights(self, model: torch.nn.Module) -> None:
        """Give the engine the weights of `model`; all ranks together."""

        def weights():
            named = dict(model.named_parameters())
            # named_parameters() has tied weights once; without the second name the head stays old
            if model.config.tie_word_embeddings:
                named["lm_head.weight"] = model.get_input_embeddings().weight
            for name, parameter in named.items():
                with whole([parameter]):
                    yield name, parameter.detach()

        self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights()})
        self.llm.reset_prefix_cache()  # it holds the old policy's keys and values

    def sleep(self) -> None:
        """Free the GPU memory for training; weights and cache are dropped."""
        if self.on_gpu:
            self.llm.sleep(level=2)

    def wake(self, model: torch.nn.Module) -> None:
        if self.on_gpu:
            torch.cuda.empty_cache()  # what the update's activations held
            self.llm.wake_up(tags=["weights"])
        self.sync_weights(model)
        if self.on_gpu:
            self.llm.wake_up(tags=["kv_cache"])


def describe(samples: list[Sample]) -> dict[str, float]:
    """What goes into the metrics: lengths, and the shares of how they ended."""
    tokens = sum(len(sample.ids) for sample in samples)
    return {
        "rollout/response_length": tokens / len(samples),
        "rollout/unfinished": 1 - sum(sample.finished for sample in samples) / len(samples),
        "rollout/stop_string": sum(sample.stopped for sample in samples) / len(samples),
        "tokens/sample": tokens,
    }


def name_shared_memory() -> None:
    """On a CPU the ranks of an engine talk through a file in shared memory, whose name vLLM takes
    from nothing here: one that a killed run has left, or another run's, would be in the way."""
    from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed

    name, port = _CPUSHMDistributed.make_group_name, os.environ["MASTER_PORT"]
    _CPUSHMDistributed.make_group_name = staticmethod(lambda group: port + name(group).strip("/"))


def hide_padding(model: torch.nn.Module, num_tokens: int) -> None:
    """Embeddings may be padded beyond the tokenizer: give those ids no probability. (vLLM's own
    allowed_token_ids would do it a request at a time, with a mask of the vocabulary for each.)"""
    compute_logits = model.compute_logits

    def compute_logits_of_tokens(hidden_states: torch.Tensor) -> torch.Tensor:
        logits = compute_logits(hidden_states)  # (n, V)
        logits[:, num_tokens:] = float("-inf")
        return logits

    model.compute_logits = compute_logits_of_tokens


def evaluate(
    sampler: Sampler,
    prompt_ids: list[list[int]],
    answers: list[str],
    rule: str,
    rounds: int,
    temperature: float,
    top_p: float,
    max_tokens: int,
    seed: int,
    stop: str = "",
    progress: bool = False,
) -> list[float]:
    """The share of right responses out of `rounds` for each problem; pass@1 is their mean. Every
    rank must call it: each samples for its share of the problems. `rule`: a key of grading.RULES.
    """
    groups = sampler.generate(
        share(prompt_ids),
        n=rounds,
        temperature=temperature,
        top_p=top_p,
        max_tokens=[max_tokens] * len(share(prompt_ids)),
        seed=seed_of(seed, "evaluate", dist.get_rank()),
        stop=stop,
        progress=progress and dist.get_rank() == 0,
    )
    scores = []
    for group, answer in zip(groups, share(answers), strict=True):
        rewards = grade_all(
            sampler.tokenizer,
            [sample.ids for sample in group],
            [sample.finished for sample in group],
            [answer] * rounds,
            rule,
        )
        scores.append(sum(rewards) / rounds)
    return gather(scores)
