"""Where reasoning steps end: rules on text, snapped to the token ids that were sampled.

A rule maps a response's text to the character offsets at which its steps end, the last one being
the length of the text. Rules are pure and never raise; the steps, joined, give the text back.
"""

import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable

from tasks.sentences import math_rule


def line_rule(text: str) -> list[int]:
    """A step is a line with the newline that ends it; leading blank lines join the first one.

    The newline closes its step (the official code opens the next one with it), so no boundary looks
    at the token behind it: the state after a step is not chosen by what came next.
    """
    blank = len(text) - len(text.lstrip("\n"))
    ends = [match.end() for match in re.finditer("\n", text) if match.end() > blank]
    return ends if ends and ends[-1] == len(text) else [*ends, len(text)]


def gsm8k_rule(text: str) -> list[int]:
    """As `line_rule`, but the answer ("#### 72" and what follows) joins the last line before it."""
    answer = re.search(r"(?<!\n)\n+#### ", text)
    ends = line_rule(text)
    return [end for end in ends if end <= answer.start()] + ends[-1:] if answer else ends


RULES: dict[str, Callable[[str], list[int]]] = {
    "line": line_rule,
    "gsm8k": gsm8k_rule,
    "math": math_rule,
}


def split_steps(response_ids: list[int], tokenizer, rule: str) -> list[int]:
    """Token offsets at which the steps of a response end, the last one len(response_ids).

    Ids are never encoded again: a boundary inside a token moves to that token's end, and steps that
    become empty vanish. EOS is a token like others: where the rule would end a step at the end of
    the text if a letter followed, EOS is a step of its own. (Never by `math_rule`, whose steps have
    at least 20 characters.)
    """
    decode_until = prefix_decoder(response_ids, tokenizer)
    text = decode_until(len(response_ids))
    boundaries = RULES[rule](text)[:-1]
    if len(text) in RULES[rule](text + "x")[:-1]:
        boundaries.append(len(text))
    ends = [0]
    for char_end in boundaries:
        end = tokens_until(len(response_ids), text[:char_end], decode_until, start=ends[-1])
        if ends[-1] < end < len(response_ids):
            ends.append(end)
    return [*ends[1:], len(response_ids)]


def tokens_until(
    num_tokens: int, text: str, decode_until: Callable[[int], str], start: int = 0
) -> int:
    """How many of the tokens, at least `start`, it takes until their text begins with `text`.

    `startswith` and not a comparison of lengths: half of a multi-byte character decodes to a
    replacement character of the same length.
    """
    return bisect_left(
        range(num_tokens), True, lo=start, key=lambda n: decode_until(n).startswith(text)
    )


def prefix_decoder(ids: list[int], tokenizer, block: int = 64) -> Callable[[int], str]:
    """n -> the text of ids[:n], without decoding all of it each time: a response of thousands of
    lines would take minutes. Two blocks are decoded, of which the first gives the second the
    context that it has in the whole text (some tokenizers drop a space at the start)."""

    def decode(start: int, end: int) -> str:
        return tokenizer.decode(ids[start:end], skip_special_tokens=True)

    # of each block: its start, the text until there, the start of the block before, that one's text
    blocks = [(0, "", 0, "")]

    def decode_until(n: int) -> str:
        _, text, before, known = blocks[bisect_right(blocks, n, key=lambda one: one[0]) - 1]
        longer = decode(before, n)
        # what comes later can change what was written: bytes of a character, or of none
        return text + longer[len(known) :] if longer.startswith(known) else decode(0, n)

    for end in range(block, len(ids), block):
        start, before, _, _ = blocks[-1]
        text = decode_until(end)
        if text != before and not text.endswith("\ufffd"):
            blocks.append((end, text, start, decode(start, end)))
    return decode_until


def step_texts(response_ids: list[int], step_ends: list[int], tokenizer) -> list[str]:
    """The text of each step; joined, that of the response."""
    texts = [*map(prefix_decoder(response_ids, tokenizer), step_ends)]
    return [text[len(before) :] for before, text in zip(["", *texts], texts, strict=False)]
