"""Where the reasoning steps of a MATH solution end; a rule of common/steps.py."""

import re
from collections.abc import Callable

# What counts as mathematics, in the order in which it is looked for. A dollar before a number is
# money where a space comes before its closing dollar ("$5 or $7").
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
# A full stop before a capital letter, not after initials or words of two letters ("Mr.", "is.").
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
    """The outermost spans of mathematics, in order; and the text with NUL for each of their
    characters."""
    spans: list[tuple[int, int]] = []
    for pattern in MATH_SPANS:
        for match in list(pattern.finditer(text)):
            start, end = match.span()
            spans = [span for span in spans if span[1] <= start or end <= span[0]] + [(start, end)]
            text = text[:start] + "\0" * (end - start) + text[end:]
    return sorted(spans), text


def math_rule(text: str) -> list[int]:
    """Sentences, lines and displayed formulas, in parts of about 20 to 100 characters: the rules of
    the official code in its order (A to I), but they lose no text and never raise. Merging and
    halving look at what comes next, so a step's advantage is not strictly unbiased here."""
    spans, masked = find_math(text)  # A

    def size(start: int, end: int) -> int:
        """Characters, counting 60 for a span, as the official code does while math is masked."""
        inside = [span for span in spans if start <= span[0] and span[1] <= end]
        return end - start + sum(60 - (b - a) for a, b in inside)

    def merge(ends: list[int], joins_next: Callable[[int, int], object]) -> list[int]:
        """Drops the ends of parts that join the next one; the last part joins the one before."""
        kept, start = [], 0
        for end in ends:
            if not joins_next(start, end):
                kept.append(end)
                start = end
        return kept if kept[-1:] == ends[-1:] else [*kept[:-1], ends[-1]]

    ends = {match.end() for match in SENTENCE_END.finditer(masked)}  # B
    ends |= {match.start() for match in re.finditer("\n", masked)}  # C
    ends = [*sorted(ends - {0, len(text)}), len(text)]
    ends = merge(  # D: short and blank lines join the line after them
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
