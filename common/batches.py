"""A batch of sequences, which all ranks compute together, in micro-batches: parts that fit."""

import functools
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.nn.utils.rnn import pad_sequence

from common import ranks


class Batch:
    """B prompts and their responses: input_ids (B, L), prompt_lens (B,), response_mask (B, T)."""

    def __init__(self, prompts: list, responses: list, max_tokens: int, device: torch.device):
        """Lists of ids. `max_tokens`: most tokens of one forward pass on a rank, with padding."""
        sequences = zip(prompts, responses, strict=True)
        self.sequences = [torch.tensor([*p, *r], dtype=torch.int32) for p, r in sequences]
        self.prompt_lens = torch.tensor([len(ids) for ids in prompts])
        self.response_lens = [len(ids) for ids in responses]
        self.lengths = [len(ids) for ids in self.sequences]
        self.max_tokens, self.device = max_tokens, device

    @functools.cached_property
    def input_ids(self) -> torch.Tensor:  # made only when asked for: it may be large
        return pad_sequence(self.sequences, batch_first=True)

    @functools.cached_property
    def response_mask(self) -> torch.Tensor:
        return self.mask(self.response_lens)

    def mask(self, lengths: list[int]) -> torch.Tensor:
        """(b,) -> (b, T). From lengths, not from ids: so EOS is learnt even where pad == eos."""
        return (torch.arange(max(self.response_lens)) < torch.tensor(lengths)[:, None]).float()

    def passes(self, rows: list[int]) -> list[tuple[list[int], float]]:
        """This rank's micro-batches of `rows`; see plan_passes."""
        return plan_passes(rows, self.lengths, self.max_tokens)

    def take(self, rows: list[int], *tensors: torch.Tensor) -> list[torch.Tensor]:
        """These rows of input_ids (cut to the longest of them), prompt_lens, response_mask and the
        `tensors` (B, T), on the device."""
        input_ids = pad_sequence([self.sequences[row] for row in rows], batch_first=True).long()
        mask = self.mask([self.response_lens[row] for row in rows])
        own = input_ids, self.prompt_lens[rows], mask
        return [tensor.to(self.device) for tensor in (*own, *(other[rows] for other in tensors))]

    @torch.no_grad()
    def map(self, function: Callable[..., torch.Tensor]) -> torch.Tensor:
        """(B, T): function(input_ids, prompt_lens, response_mask) of every row, on every rank."""
        result = torch.zeros_like(self.response_mask)
        for rows, weight in self.passes(list(range(len(self.lengths)))):
            result[rows] += function(*self.take(rows)).cpu() * weight
        ranks.add_up(result)  # a rank has computed some of the rows, the sum has all
        return result

    def count_padding(self) -> int:
        """Tokens that this rank computes for nothing in one pass over all: padding, weight 0."""
        passes = self.passes(list(range(len(self.lengths))))
        computed = sum(max(self.lengths[row] for row in rows) * len(rows) for rows, _ in passes)
        return computed - sum(self.lengths[row] * weight for rows, weight in passes for row in rows)


def plan_passes(
    items: list[int], lengths: list[int], max_tokens: int
) -> list[tuple[list[int], float]]:
    """This rank's micro-batches of `items`, each with weight 1, then fillers with weight 0, so that
    all ranks make the same number of passes: collective operations wait for every rank."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    by_length = sorted(items, key=lengths.__getitem__)  # dealt out in turn, so ranks do equal work
    cuts = [cut(by_length[r::world_size], lengths, max_tokens) for r in range(world_size)]
    padding = max(map(len, cuts)) - len(cuts[rank])
    return [(rows, 1.0) for rows in cuts[rank]] + [(by_length[:1], 0.0)] * padding


def cut(items: list[int], lengths: list[int], max_tokens: int) -> list[list[int]]:
    """Cuts items, sorted by length, into groups of at most `max_tokens` when padded to their
    longest. (A longer item is a group of its own.)"""
    groups: list[list[int]] = []
    for item in items:
        if not groups or (len(groups[-1]) + 1) * lengths[item] > max_tokens:
            groups.append([])
        groups[-1].append(item)
    return groups
