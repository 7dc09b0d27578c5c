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
    blank = len(text) - len(text.lstrip("\n"))
    ends = [match.end() for match in re.finditer("\n", text) if match.end() > blank]
    return ends if ends and ends[-1] == len(text) else [*ends, len(text)]


def gsm8k_rule(text: str) -> list[int]:
    """As `line_rule`, but the answer ("#### 72" and what follows) joins the last line before it."""
    answer = re.search(r"(?<!\n)\n+#### ", text)
    ends = line_rule(text)
    return [end for end in ends if end <= answer.start()] + ends[-1:] if answer else ends


# What counts as mathematics, in the order in which it is looked for. A dollar before a number whose
# partner stands behind a space is money ("$5 or $7").
MATH_SPANS = [
    re.compile(pattern, re.DOTALL)
    for pattern in (
        r"\[asy\].*?\[/asy\]",
        r"\$\\begin\{tabular\}.*?\$",
        r"\\begin\{tabular\}.*?\\end\{tabular\}",
        r"\\\(.*?\\\)",
        r"\\\[.*?\\\]",
        r"(?<!\\)\$\$.+?\$\$",
        r"(?<!\\)\$(?!\d[^$]*\s\$).+?(?<!\\)\$(?!\$)",
        r"\\begin\{([^{}]*)\}.*?\\end\{\1\}",
    )
]
# A full stop before a capital letter, but for initials and for words of two letters ("Mr.", "is.").
SENTENCE_END = re.compile(
    r"(?<![^A-Za-z0-9_][A-Za-z])(?<!\s[A-Za-z][A-Za-z])\.(?=\s+[A-Z])", re.ASCII
)
MATH_PERIOD = re.compile(r"\.(\$\$?|\\\)|\\\])$")  # a sentence that ends inside its formula
OPENER = re.compile(r"\s*(\$\$?|\\\(|\\\[|\\begin\{[^{}]*\}|\[asy\])\s*")
WORD_CUTS, SIGN_CUTS = (
    (",", " and ", ":", " to "),
    (*(",$", ",\\)", ",\\]", "=", "\\equiv", "+", "\\cancelto"),),
)


def find_math(text: str) -> tuple[list[tuple[int, int]], str]:
    """The spans of mathematics, the outermost ones, in order; and the text with NUL in their place,
    character by character."""
    spans: list[tuple[int, int]] = []
    for pattern in MATH_SPANS:
        for match in list(pattern.finditer(text)):
            start, end = match.span()
            spans = [span for span in spans if span[1] <= start or end <= span[0]] + [(start, end)]
            text = text[:start] + "\0" * (end - start) + text[end:]
    return sorted(spans), text


def math_rule(text: str) -> list[int]:
    """Sentences, lines and displayed formulas, in parts of about 20 to 100 characters: the rules of
    the official code in its order (A to I), without its losses and its exceptions. Merging and
    halving look at what comes next, so a step's advantage is not strictly unbiased here."""
    spans, masked = find_math(text)  # A

    def size(start: int, end: int) -> int:
        """Characters, with 60 for a span: what the official code measures while math is masked."""
        inside = [span for span in spans if start <= span[0] and span[1] <= end]
        return end - start + sum(60 - (b - a) for a, b in inside)

    def merge(ends: list[int], joins_next: Callable[[int, int], object]) -> list[int]:
        """Without the ends of parts that join the next one; the last part joins backwards."""
        kept, start = [], 0
        for end in ends:
            if not joins_next(start, end):
                kept.append(end)
                start = end
        return kept if kept[-1:] == ends[-1:] else [*kept[:-1], ends[-1]]

    ends = {match.end() for match in SENTENCE_END.finditer(masked)}  # B
    ends |= {match.start() for match in re.finditer("\n", masked)}  # C
    ends = [*sorted(ends - {0, len(text)}), len(text)]
    ends = merge(  # D: short lines, and blank ones, join the line behind them
        ends,
        lambda a, b: (
            b < len(text)
            and (
                text[a:b] == "\n"
                or (text[b] == "\n" and not text[a:b].endswith(".") and size(a, b) < 20)
            )
        ),
    )
    ends = sorted({*ends, *(b for a, b in spans if MATH_PERIOD.search(text[a:b]))})  # E
    ends = merge(ends, lambda a, b: b - a < 20 and not MATH_PERIOD.search(text[a:b]))  # F
    lines = {i for a, b in spans for i in range(a + 1, b) if text[i] == "\n"}
    ends = sorted({*ends, *lines})  # G
    ends = merge(ends, lambda a, b: b - a < 3 or OPENER.fullmatch(text[a:b]))  # H

    def halve(start: int, end: int) -> list[int]:  # I
        if end - start <= 100:
            return [end]
        for cuts, least, measure in (
            (WORD_CUTS, 40, size),
            (SIGN_CUTS, 20, lambda a, b: b - a),
        ):
            for cut in cuts:
                found = [start + m.end() for m in re.finditer(re.escape(cut), text[start:end])]
                in_math = cuts is SIGN_CUTS
                found = [i for i in found if (masked[i - len(cut)] == "\0") == in_math]
                middle = min(
                    found, key=lambda i: abs(measure(start, i) - measure(i, end)), default=0
                )
                if min(middle - start, end - middle) >= least:
                    return [*halve(start, middle), *halve(middle, end)]
        return [end]

    return [cut for start, end in zip([0, *ends], ends, strict=False) for cut in halve(start, end)]


RULES: dict[str, Callable[[str], list[int]]] = {
    "line": line_rule,
    "gsm8k": gsm8k_rule,
    "math": math_rule,
}


def split_steps(response_ids: list[int], tokenizer, rule: str) -> tuple[list[int], list[bool]]:
    """Token offsets at which the steps of a response end, the last one len(response_ids), and for
    each boundary that the rule found in the text whether it had to move.

    Ids are never encoded again: a boundary inside a token moves to that token's end, and steps that
    become empty vanish. EOS is a token like others: where the rule would end a step at the end of
    the text if a letter followed, EOS is a step of its own. (Never by `math_rule`, whose steps have
    at least 20 characters.)
    """

    def decode(ids: list[int]) -> str:
        return tokenizer.decode(ids, skip_special_tokens=True)

    text = decode(response_ids)
    boundaries = RULES[rule](text)[:-1]
    if len(text) in RULES[rule](text + "x")[:-1]:
        boundaries.append(len(text))
    ends, moved = [0], []
    for char_end in boundaries:
        end = tokens_until(response_ids, text[:char_end], decode, start=ends[-1])
        moved.append(len(decode(response_ids[:end])) > char_end)
        if ends[-1] < end < len(response_ids):
            ends.append(end)
    return [*ends[1:], len(response_ids)], moved


def tokens_until(
    ids: list[int], text: str, decode: Callable[[list[int]], str], start: int = 0
) -> int:
    """How many of the ids, at least `start`, it takes until their text begins with `text`.

    `startswith` and not a comparison of lengths: half of a multi-byte character decodes to a
    replacement character of the same length.
    """
    return bisect_left(
        range(len(ids)), True, lo=start, key=lambda n: decode(ids[:n]).startswith(text)
    )


def step_texts(response_ids: list[int], step_ends: list[int], tokenizer) -> list[str]:
    """The text of each step; joined, that of the response."""
    texts = [tokenizer.decode(response_ids[:end], skip_special_tokens=True) for end in step_ends]
    return [text[len(before) :] for before, text in zip(["", *texts], texts, strict=False)]
