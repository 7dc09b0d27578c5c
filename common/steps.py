"""Where reasoning steps end: rules on text, snapped to the token ids that were sampled.

A rule maps a response's text to the character offsets at which its steps end, the last one being
the length of the text. Rules are pure and never raise; the steps, joined, give the text back.
"""

import re
from bisect import bisect_left
from collections.abc import Callable


def line_rule(text: str) -> list[int]:
    """A step is a line with the newline that ends it; leading blank lines join the first one.

    The newline closes its step (the official code opens the next one with it), so no boundary looks
    at the token behind it: the state after a step is not chosen by what came next.
    """
    ends = [match.end() for match in re.finditer("\n", text) if text[: match.end()].strip("\n")]
    return ends if ends and ends[-1] == len(text) else [*ends, len(text)]


def gsm8k_rule(text: str) -> list[int]:
    """As `line_rule`, but the answer ("#### 72" and what follows) joins the last line before it."""
    answer = re.search(r"\n+#### ", text)
    ends = line_rule(text)
    return [end for end in ends if end <= answer.start()] + ends[-1:] if answer else ends


RULES: dict[str, Callable[[str], list[int]]] = {"line": line_rule, "gsm8k": gsm8k_rule}


def split_steps(response_ids: list[int], tokenizer, rule: str) -> tuple[list[int], int]:
    """Token offsets at which the steps of a response end, the last one len(response_ids), and how
    many boundaries had to move.

    Ids are never encoded again: a boundary inside a token moves to that token's end, steps that
    become empty vanish, special tokens (EOS) belong to the last step.
    """

    def decode(num_tokens: int) -> str:
        return tokenizer.decode(response_ids[:num_tokens], skip_special_tokens=True)

    text = decode(len(response_ids))
    ends, moved = [0], 0
    for char_end in RULES[rule](text)[:-1]:
        # The first token after which the text up to the boundary is there. `startswith` and not a
        # comparison of lengths: half of a multi-byte character decodes to a replacement character
        # of the same length.
        end = bisect_left(
            range(len(response_ids)),
            True,
            lo=ends[-1],
            key=lambda num_tokens: decode(num_tokens).startswith(text[:char_end]),
        )
        moved += len(decode(end)) > char_end
        if ends[-1] < end < len(response_ids):
            ends.append(end)
    return [*ends[1:], len(response_ids)], moved


def step_texts(response_ids: list[int], step_ends: list[int], tokenizer) -> list[str]:
    """The text of each step; joined, that of the response."""
    texts = [tokenizer.decode(response_ids[:end], skip_special_tokens=True) for end in step_ends]
    return [text[len(before) :] for before, text in zip(["", *texts], texts, strict=False)]
