r"""Other spellings of a MATH answer that say the same, and answers near it that do not.

`spellings` and `near` yield (kind, text). What they make is what a model writes: the kinds stand in
the tables, or in the functions that need the value.
"""

# ruff: noqa: RUF001 (letters that look alike are the point)

import re
from collections.abc import Iterator
from fractions import Fraction

GROUP = r"((?:[^{}]|\{[^{}]*\})*)"
FRACTION = re.compile(r"(-?)\\[dt]?frac\{(\d+)\}\{(\d+)\}")
BRACKETS = re.compile(r"\\(?:left|right)\s*")

# A kind, and what stands around the answer (@).
FRAMES = r"""
around: $@$ ; \(@\) ; @. ; \displaystyle @ ; \boxed{@} ; {@} ; \bm{@} ; \color{blue}{@} ; \large @
said: \text{The answer is }@ ; \text{The value is } @ ; \text{Answer: }@ ; = @ ; \Rightarrow @
"""
# A kind, a pattern and what it becomes; where the pattern is not found there is no such spelling.
REWRITES = r"""
fraction: \\[dtc]?frac(?=\{) => \\dfrac
fraction: \\[dtc]?frac(?=\{) => \\tfrac
fraction: \\[dtc]?frac(?=\{) => \\nicefrac
fraction: \\[dtc]?frac\{<group>\}\{<group>\}(?! *\\[a-z]{5}) => {\1 \\over \2}
fraction: \\frac\{(\d)\}\{(\d)\} => \\frac\1\2
brackets: \\(?:left|right) =>
brackets: \\(left|right) => \\big
root: \\sqrt\{(\d)\} => \\sqrt\1
root: \\sqrt\{(\d+)\} => √\1
root: (?<![a-z] )(?<![a-z])\\sqrt\{(\w+)\} => sqrt(\1)
root: (\d) *\\sqrt(?=\{) => \1\\cdot\\sqrt
root: (\d) *\\sqrt(?=\{) => \1*\\sqrt
pi: \\pi(?![a-z])\s* => π
pi: (\d) *\\pi => \1\\cdot\\pi
minus: - => −
infinity: \\infty => ∞
union: \\cup => \\bigcup
union: (?<=[)\]])\s*\\cup\s* => U
thousands: (?<=\d)(?:,\\! ?|\{,\})(?=\d{3}) =>
thousands: (?<=\d)(?:,\\! ?|\{,\})(?=\d{3}) => ,
degrees: \^\\circ => °
degrees: \^\\circ => {}^{\\circ}
degrees: \^\\circ(?!\w) => ^{o}
percent: \\% => %
percent: \s*\\% => \\text{ percent}
percent: \s*\\% => " pct"
dollars: ^\\\$ *(?=[\d.]+$) => \\textdollar
dollars: ^\\\$ *(?=[\d.]+$) => USD
dollars: ^\\\$ *([\d.]+)$ => \1 \\text{ dollars}
unit: (?<=[\d}])\s*\\text\{ ?([a-z ]+)\}$ => \\ \\mathrm{\1}
matrix: pmatrix => bmatrix
matrix: pmatrix => pmatrix*
matrix: \\begin\{pmatrix\}(.*)\\end\{pmatrix\} => \\left(\\begin{array}{ccc}\1\\end{array}\\right)
matrix: \\\\ => \\\\[1ex]
base: ^(\d+)_\{?(\d+)\}?$ => \1_{(\2)}
base: ^(\d+)_\{?(\d+)\}?$ => (\1)_{\2}
base: ^(\d+)_\{?(\d+)\}?$ => \1\\text{ (base \2)}
choice: ^\\text\{\(([A-F])\)\}$ => \1
choice: ^\\text\{\(([A-F])\)\}$ => \\textbf{(\1)}
choice: ^\\text\{\(([A-F])\)\}$ => \\text{Option \1}
ratio: ^(\d+) ?: ?(\d+)$ => \1\\text{ to }\2
label: ^[a-zA-Z] *= *(?!0$) =>
equation: ^([^=]*[xyz][^=]*)=([^=]*)$ => \2=\1
order: ^([^-+=,(){}\\<_]+)([-+])([^-+=,(){}\\<_]+)$ => \2\3+\1
set: ^(-?\d+(?:, ?-?\d\d?)+)$ => \\{\1\\}
set: ^(-?\d+), ?(-?\d\d?)$ => \2\\text{ and }\1
set: ^(-?\d+), ?(-?\d\d?)$ => x=\1\\text{ or }x=\2
label: ^(-?\d+|-?\d*\\sqrt\{\d+\})$ => f(-1)=\1
label: ^(-?\d+|-?\d*\\sqrt\{\d+\})$ => |AB| = \1
label: ^\((-?\d+), ?(-?\d+)\)$ => (x_1,y_1)=(\1,\2)
power: \^(\d)(?!\d) => ^{\1}
power: \^\{(\d+)\} => **\1
"""

# A kind, a pattern and what it becomes: another answer.
CHANGES = r"""
sign: (?<![\w)}m ])-(?=\s*[1-9]) =>
sign: (?<=[\w)}])(?<!phantom) *- *(?=[1-9]) => +
sign: (?<=\w) *\+ *(?=[1-9]) => -
end: ^(?:\\left)?\((?=[-\d ]+,.*\]) => [
end: \](?!.) => )
root: \\sqrt\{(\d+)\} => \1
pi: \\pi(?![a-z]) => 3.14
item: ^-?\d+, ?(?=-?\d) =>
item: ^(-?\d+(?:, ?-?\d\d?)+)$ => \1, 99
point: ^\((-?\d+),( ?)(-?\d+)\)$ => (\1,\2\g<3>1)
power: \^(\d)(?!\d|.*(?:text|mbox)) => ^{\g<1>0}
imaginary: (?<=\d)i$ =>
unit: \\% => \\$
unit: ^\\\$ ?(?=\d) => \\%
unit: inches => feet
"""


def rules(table: str) -> list[tuple[str, re.Pattern, str]]:
    found = []
    for line in table.replace("<group>", GROUP).strip().splitlines():
        kind, rule = line.split(": ", 1)
        old, _, new = rule.rpartition(" =>")
        found.append((kind, re.compile(old), new[1:].strip('"')))
    return found


FRAMES = [line.split(": ", 1) for line in FRAMES.strip().splitlines()]
FRAMES = [(kind, frame) for kind, frames in FRAMES for frame in frames.split(" ; ")]
REWRITES, CHANGES = rules(REWRITES), rules(CHANGES)


def spellings(answer: str) -> Iterator[tuple[str, str]]:
    if not re.search(r"[.,]$|^\\approx|\\text|\\mbox|[A-Z]{4}", answer):
        yield from ((kind, frame.replace("@", answer)) for kind, frame in FRAMES)
    for kind, old, new in REWRITES:
        if old.search(answer):
            yield kind, old.sub(new, answer)
    if re.fullmatch(r"-?[1-9]\d*", answer):
        yield from integers(int(answer))
    if match := FRACTION.fullmatch(answer):
        yield from fractions(*match.groups())
    yield from intervals(BRACKETS.sub("", answer))


def integers(number: int) -> Iterator[tuple[str, str]]:
    yield "integer", f"{number}.0"
    yield "integer", rf"\frac{{{3 * number}}}{{3}}"
    yield "integer", f"{number:.9e}" if abs(number) < 10**9 else f"{number}/1"
    if abs(number) >= 1000:
        for gap in (",", "{,}", r",\!", r"\,", r"\;", r"{,}\!", "\u2009", "\u202f"):
            yield "thousands", f"{number:,}".replace(",", gap)


def fractions(sign: str, above: str, below: str) -> Iterator[tuple[str, str]]:
    yield "fraction", f"{sign}{above}/{below}"
    yield "fraction", f"{sign}{above}\u2044{below}"
    yield "fraction", rf"\frac{{{sign}{int(above) * 3}}}{{{int(below) * 3}}}"
    if len(below) < 3:
        rounded = f"{value(sign, above, below):.4f}"
        yield "approximate", rf"x = {sign}\frac{{{above}}}{{{below}}} \approx {rounded}"
    whole, rest = divmod(int(above), int(below))
    if whole and rest:
        yield "mixed", rf"{sign}{whole}\frac{{{rest}}}{{{below}}}"
        yield "mixed", rf"{sign}{whole}{{{rest} \over {below}}}"
    if 10**6 % int(below) == 0:
        yield "decimal", f"{value(sign, above, below):.6f}"


def value(sign: str, above: str, below: str) -> float:
    return float(Fraction(f"{sign}{above}/{below}"))


def intervals(answer: str) -> Iterator[tuple[str, str]]:
    r"""[1,2) as 1 \le x < 2; a pair in round brackets is a point."""
    match = re.fullmatch(r"([(\[])([^,()\[\]]+),([^,()\[\]]+)([)\]])", answer)
    if not match or "a" in answer or ("infty" not in answer and match[1] + match[4] == "()"):
        return
    opening, low, high, closing = match.groups()
    below = ("x < " if closing == ")" else r"x \le ") + high
    above = low + (" < " if opening == "(" else r" \le ")
    condition = below if "infty" in low else above + "x" if "infty" in high else above + below
    if "infty" not in low or "infty" not in high:
        yield "interval", condition
        yield "interval", rf"\{{x \in \mathbb{{R}} \mid {condition}\}}"
        yield "interval", rf"\left\{{x \;\middle|\; {condition}\right\}}"
        yield "interval", rf"{condition}, x \in \mathbb{{R}}"
    yield "interval", rf"x \in {answer}"
    yield "interval", rf"\text{{Domain: }}{answer}"


def near(answer: str) -> Iterator[tuple[str, str]]:
    for kind, old, new in CHANGES:
        if old.search(answer):
            yield kind, old.sub(new, answer, count=1)
    # One digit for another says the same in 1_6 and 1_7, and within the tolerance of \approx.
    if not re.search(r"_|approx|\^\d$", answer):
        for match in re.finditer(r"\d", answer):
            digit = str((int(match[0]) + 1) % 10)
            yield "digit", answer[: match.start()] + digit + answer[match.end() :]
    if match := FRACTION.fullmatch(answer):
        yield "rounded", f"{value(*match.groups()):.16f}1"
        if match[2] != match[3]:
            yield "upside down", rf"{match[1]}\frac{{{match[3]}}}{{{match[2]}}}"
