"""A response and the rollouts from its states as one row of a batch, where each prefix stands once.

A branch is (start, ids, ...): the response of an episode, whose tokens before `start` are those of
the first branch, which is the sampled response from 0 on. A tree has the tokens of its branches,
one branch after another. `before` says which token comes before each one in its own branch: its
index in the row, prompt included; -1 on padding.
"""

import torch
from torch.nn.utils.rnn import pad_sequence

from common import require
from common.batches import Batch


def make_batch(
    prompts: list[list[int]], branches: list[list[tuple]], max_tokens: int, device: torch.device
) -> Batch:
    """B prompts and their trees; prompt_lens is (B, L), `before`. Raises UsageError for a tree of
    more than `max_tokens` tokens: attention takes the square of that."""
    rows, befores = [], []
    for prompt, of_row in zip(prompts, branches, strict=True):
        ids, before = [], [0, *range(len(prompt) - 1)]
        for start, branch, *_ in of_row:
            first = len(prompt) + len(ids)
            new = range(first, first + len(branch) - start)
            # the tokens before `start` are those of the first branch
            before += [len(prompt) + start - 1, *new[:-1]][: len(new)]
            ids += branch[start:]
        rows.append(ids)
        befores.append(torch.tensor(before))
    most = max(map(len, befores))
    what = f"a response and its rollouts have {most} tokens, --micro-batch-tokens is {max_tokens}"
    require(most <= max_tokens, f"{what}: raise it (memory grows with its square), or lower --k")
    batch = Batch(prompts, rows, max_tokens, device)
    batch.prompt_lens = pad_sequence(befores, batch_first=True, padding_value=-1)
    return batch


def read(
    prompt_lens: torch.Tensor, input_ids: torch.Tensor, response_mask: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """`before` (b, L) and the prompts' lengths (b,), of trees or of rows without branches."""
    length = input_ids.shape[1]
    if prompt_lens.dim() == 1:
        before = torch.arange(length, device=input_ids.device).sub(1).clamp(min=0)
        return before.expand_as(input_ids), prompt_lens
    before = prompt_lens[:, :length]
    lengths = (before >= 0).sum(dim=1) - response_mask.sum(dim=1).long()
    return before.clamp(min=0), lengths


def attend(before: torch.Tensor, model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """What a model needs to see each branch as if it stood alone: a mask (b, 1, L, L) in which a
    token attends to those before it in its branch, and their number (b, L) as its position. Raises
    UsageError for a model whose layers would need more than that."""
    config = getattr(model, "module", model).config  # of a DeepSpeed engine
    window = getattr(config, "sliding_window", None)
    has_window = window and getattr(config, "use_sliding_window", True)
    what = "this model's attention has a sliding window, or ALiBi: vineppo_tree cannot mask it"
    require(not has_window and not getattr(config, "alibi", False), what)
    rows, length = torch.arange(len(before), device=before.device), before.shape[1]
    seen = torch.eye(length, dtype=torch.bool, device=before.device).repeat(len(before), 1, 1)
    depth = torch.zeros_like(before)
    for t in range(1, length):
        seen[:, t] |= seen[rows, before[:, t]]
        depth[:, t] = depth[rows, before[:, t]] + 1
    dtype = next(model.parameters()).dtype
    hidden = torch.finfo(dtype).min
    mask = torch.zeros_like(seen, dtype=dtype).masked_fill(~seen, hidden)
    return {"attention_mask": mask[:, None], "position_ids": depth}


def pad(branches: list[list[tuple]], place: int) -> torch.Tensor:
    """(B, T), 0 on padding: what the branches of each row have at this place, one after another."""
    rows = [[x for branch in of_row for x in branch[place]] for of_row in branches]
    return pad_sequence([torch.tensor(row) for row in rows], batch_first=True)
