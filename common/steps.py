"""Where reasoning steps end: rules find ends in a text, which move to ends of sampled tokens.

A rule maps a response's text to the character offsets at which its steps end; the last one is the
length of the text, so the steps, joined, give the text back. Rules have no state and never raise.
"""

import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable

from tasks.sentences import math_rule


def line_rule(text: str) -> list[int]:
    """A step is a line and the newline that ends it; blank lines at the start join the first.

    The newline closes its step, so what follows has no say in where the step ends. (The official
    code begins the next step with it.)
    """
    blank = len(text) - len(text.lstrip("\n"))
    ends = [match.end() for match in re.finditer("\n", text) if match.end() > blank]
    return ends if ends and ends[-1] == len(text) else [*ends, len(text)]


def gsm8k_rule(text: str) -> list[int]:
    """As `line_rule`, but the answer ("#### 72" and all after it) joins the last line before it."""
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

    The text is never encoded again: a boundary inside a token moves to the token's end, and steps
    that become empty vanish. EOS is a step of its own where, with a letter in its place, the rule
    would end a step before it (never with `math_rule`, whose steps have at least 20 characters).
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
    """The smallest number of tokens, at least `start`, whose text begins with `text`.

    Lengths are not compared, since half of a multi-byte character decodes to a replacement
    character, which has the same length.
    """
    return bisect_left(
        range(num_tokens), True, lo=start, key=lambda n: decode_until(n).startswith(text)
    )


def prefix_decoder(ids: list[int], tokenizer, block: int = 64) -> Callable[[int], str]:
    """n -> the text of ids[:n], without decoding it all each time, which for thousands of lines
    takes minutes. Two blocks are decoded: the last one and, as its context, the one before it (some
    tokenizers drop a space at the start)."""

    def decode(start: int, end: int) -> str:
        return tokenizer.decode(ids[start:end], skip_special_tokens=True)

    # of each block: its start, the text up to there, the start of the block before, and its text
    blocks = [(0, "", 0, "")]

    def decode_until(n: int) -> str:
        _, text, before, known = blocks[bisect_right(blocks, n, key=lambda one: one[0]) - 1]
        longer = decode(before, n)
        # a later token can change earlier text: it may complete a character, or break it
        return text + longer[len(known) :] if longer.startswith(known) else decode(0, n)

    for end in range(block, len(ids), block):
        start, before, _, _ = blocks[-1]
        text = decode_until(end)
        if text != before and not text.endswith("\ufffd"):
            blocks.append((end, text, start, decode(start, end)))
    return decode_until


def step_texts(response_ids: list[int], step_ends: list[int], tokenizer) -> list[str]:
    """The texts of the steps; joined, they are the response."""
    texts = [*map(prefix_decoder(response_ids, tokenizer), step_ends)]
    return [text[len(before) :] for before, text in zip(["", *texts], texts, strict=False)]
