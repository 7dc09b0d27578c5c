r"""Are two mathematical answers the same? A process of its own says, so that nothing it meets can
hang, crash or fill the one that trains: `Worker` asks `python -m common.equivalence`, one JSON line
each way, and kills it at a limit of time; it gives itself a limit of memory.

An answer is cleaned (`clean`), taken apart at its top level (`read`: lists, sets, intervals,
relations, matrices, units, ...) and its leaves are read by latex2sympy2_extended, the grammar of
math-verify, into trees of placeholders: numbers are put in afterwards, within bounds (`evaluate`),
so that 9^{9^{9}} is never worked out. Leaves are compared exactly, without a tolerance. What cannot
be read equals only its own spelling. Nothing is ever evaluated as code.
"""

import json
import os
import re
import resource
import select
import subprocess
import sys
import threading
import time
import unicodedata
from functools import lru_cache
from itertools import product
from typing import Any, NamedTuple

TIME_LIMIT = 4.0  # seconds for a pair; all but made-up ones take a few hundredths
START_LIMIT = 60.0  # seconds for the import of sympy, on a busy machine
MEMORY_LIMIT = 1 << 30  # bytes of address space
MAX_DIGITS, MAX_TOKENS, MAX_DEPTH, MAX_ITEMS = 200, 400, 25, 100  # of what is read at all
MAX_BITS, MAX_FACTORIAL = 32_000, 3_000  # of numbers that are worked out

# ---- cleaning: many spellings to few -------------------------------------------------------------

SYMBOLS = {"−": "-", "–": "-", "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "÷": r"\div "}
SYMBOLS |= {"π": r"\pi ", "∞": r"\infty ", "√": r"\sqrt ", "°": r"^\circ ", "±": r"\pm "}
SYMBOLS |= {"≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in "}
SYMBOLS |= {
    "∅": r"\emptyset ",
    "θ": r"\theta ",
    "α": r"\alpha ",
    "β": r"\beta ",
    "ℝ": r"\mathbb{R}",
}
SYMBOLS |= {"€": r"\$", "£": r"\$", "≈": r"\approx ", "’": "'", "′": "'", '"': " "}
GREEK = "alpha beta gamma delta epsilon varepsilon zeta eta theta kappa lambda mu nu xi rho sigma "
GREEK += "tau phi varphi chi psi omega Gamma Delta Theta Lambda Sigma Phi Psi Omega ell"
FUNCTIONS = "sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh ln log exp".split()
# Plain words with a meaning of their own.
PLAIN = {name: "\\" + name + " " for name in [*FUNCTIONS, "sqrt", "pi", "theta"]}
PLAIN |= {"infinity": r"\infty ", "inf": r"\infty ", "oo": r"\infty ", "and": " , ", "or": r" \or "}
PLAIN |= {"cup": r"\cup ", "cap": r"\cap ", "union": r"\cup ", "in": r"\in "}
UNITS = {}  # spelling -> unit; a unit may be left out, but two different ones differ
for _line in """centimeter cm centimetre|meter m metre|millimeter mm|kilometer km kilometre|inch in
inche|foot ft feet|yard yd|mile mi|gram g gm|kilogram kg|pound lb|ounce oz|second s sec|minute min
|hour hr h|day|week|month|year yr|cent ¢|dollar usd buck|degree deg|percent|mph|liter litre l|radian
rad|unit|square sq|cubic cu|euro|acre|gallon gal|am|pm""".split("|"):
    UNITS |= dict.fromkeys(_line.split(), _line.split()[0])
MAGNITUDES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
COUNTS = "zero one two three four five six seven eight nine ten eleven twelve".split()

TEXT = re.compile(
    r"\\(?:text(?:bf|it|rm|normal|sf|tt)?|mbox|hbox|math(?:rm|bf|it|sf)|operatorname\*?)"
    r"\s*\{([^{}]*)\}"
)
NOISE = re.compile(
    r"\\(?:left|right|[bB]igg?[lr]?|displaystyle|textstyle|limits|quad|qquad|bf|rm|it)(?![a-zA-Z])"
    r"|\\phantom\s*(?:\{[^{}]*\}|.)|\\[()\[\]]"
)
RENAMED = {r"\\[dtc]frac": r"\\frac", r"\\geq?(?:slant|q)?(?![a-z])": r"\\ge ", r"\*\*": "^"}
RENAMED |= {r"\\leq?(?:slant|q)?(?![a-z])": r"\\le ", r"\\neq(?![a-z])": r"\\ne "}
RENAMED |= {r">=": r"\\ge ", r"<=": r"\\le ", r"!=": r"\\ne ", r"\\gt(?![a-z])": ">"}
RENAMED |= {r"\\lt(?![a-z])": "<", r"\\(?:varnothing|O)(?![a-z])": r"\\emptyset "}
RENAMED |= {r"\\lbrace(?![a-z])": r"\\{", r"\\rbrace(?![a-z])": r"\\}", r"\\dbinom": r"\\binom"}
RENAMED |= {r"\\[lr](?:angle)(?![a-z])": lambda m: "(" if m[0][1] == "l" else ")"}
RENAMED |= {r"\\(sin|cos|tan)\s*\^\s*\{?-1\}?": r"\\arc\1 ", r"\\[lr]?vert(?![a-z])": "|"}
RENAMED |= {
    # thousands in the spellings that can be nothing else
    r"(?<=\d)(?:\{,\}|,\\!|\\!|\\[, ]|~)(?=\d{3}(?!\d))": "",
    r"(?<![\d.,/])\d{1,3}(?: \d{3})+(?![\d/])": lambda m: m[0].replace(" ", ""),
    r"\\[,;:! ]|~|\s": " ",
    r"\^\s*(?:\{\s*\\circ\s*\}|\\circ)\s*(?:[CFK](?![a-zA-Z]))?": r"\\degree ",
    r"\\%|%": ' "percent"',
    r"\\?\$\s*([\d.,]*\d)": r'\1"dollar"',
    r"\\\$|\$": "",
    # \frac12, \frac{1}2, 2 1/2, 1/2: one spelling for the fractions of numbers
    r"\\frac\s*(\d)\s*(\d)": r"\\frac{\1}{\2}",
    r"\\frac\s*(\d)\s*\{": r"\\frac{\1}{",
    r"\\frac\s*\{\s*([^{}]*?)\s*\}\s*(?:(\d)|\{\s*([^{}]*?)\s*\})": r"\\frac{\1}{\2\3}",
    r"(?<![\w.^)}/])(\d+) +(\d+)/(\d+)(?![\w.!^/])": r"\1\\frac{\2}{\3}",
    r"(?<![\w.^)}/])(\d+)\s*/\s*(\d+)(?![\d.!^])": r"\\frac{\1}{\2}",
    r"(?<![\w.^)}])(\d+)\s*\\frac\{(\d+)\}\{(\d+)\}": lambda m: (  # a mixed number
        rf"({m[1]}+\frac{{{m[2]}}}{{{m[3]}}})"
        if len(m[2] + m[3]) < 20 and int(m[2]) < int(m[3])
        else rf"{m[1]}\cdot\frac{{{m[2]}}}{{{m[3]}}}"
    ),
    # 0.1\overline{6}, 0.(3), 0.333...
    r"(\d*)\.(\d*)\\(?:overline|bar|dot)\s*\{?(\d+)\}?": lambda m: repeating(*m.groups()),
    r"(\d+)\.(\d*)\((\d+)\)": lambda m: repeating(*m.groups()),
    r"(\d*)\.(\d{0,9}?)(\d{1,6}?)\3\3+(?:\\l?dots|\\cdots|\.\.\.)": lambda m: repeating(
        *m.groups()
    ),
    r"(?<![\w.])(\d+\.?\d*)(?:e|E\+?)(\d{1,3})(?![\w.])": r"\1\\cdot10^{\2}",
    r"(?<![\w.])(\d+\.?\d*)E-(\d{1,3})(?![\w.])": r"\1\\cdot10^{-\2}",
    r"\^\s*(-\s*\w+)": r"^{\1}",
    r"(?i)^(?:\"?the\"?)? *\"?(?:final )?answer(?: is)?\"?\s*:?\s*\"?(?=.)": "",
    r"^(?:\\approx|\\sim)": "",
    r"^\(?([A-Za-z])\)\s*$": r"\1",  # a choice
}
RENAMES = [(re.compile(pattern), new) for pattern, new in RENAMED.items()]


def repeating(whole: str, fraction: str, block: str) -> str:
    """0.1 and a block 6 without end: (0.1 + 6/90) as LaTeX."""
    nines = "9" * len(block) + "0" * len(fraction)
    return rf"({whole or 0}.{fraction}0+\frac{{{block}}}{{{nines}}})"


def clean(text: str) -> str:
    """One spelling of what is written alike; words become `"words"` in lower case."""
    letters = []
    for char in text:
        kind, _, parts = unicodedata.decomposition(char).partition(" ")
        if kind in ("<super>", "<sub>", "<fraction>"):
            plain = "".join(chr(int(part, 16)) for part in parts.split()).replace("−", "-")
            up, _, down = plain.partition("\u2044")
            wrap = {"<super>": f"^{{{plain}}}", "<sub>": f"_{{{plain}}}"}
            letters.append(wrap.get(kind, rf"\frac{{{up}}}{{{down}}}"))
        else:
            letters.append(SYMBOLS.get(char) or unicodedata.normalize("NFKC", char))
    text = re.sub(r"\}\^\{(?=[\d-]+\})", "", "".join(letters)) if "²" in text else "".join(letters)
    text = NOISE.sub(" ", text.replace("\\\\", r"\cr "))
    for _ in range(3):  # \text in \textbf
        text = TEXT.sub(lambda match: f" {clean_words(match[1], in_text=True)} ", text)
    text = clean_words(text, in_text=False)
    text = re.sub(r'"\s*"', " ", text)
    for pattern, new in RENAMES:
        text = pattern.sub(new, text)
    return re.sub(r"\s+", " ", text).strip().rstrip(".:").strip()


def clean_words(text: str, in_text: bool) -> str:
    """Runs of letters: functions, separators, words; elsewhere, products of symbols."""

    def word(match: re.Match) -> str:
        letters = match[0].strip()
        name = re.sub(r"[.\s]+", " ", letters.lower()).strip()
        if name in PLAIN and (name not in ("in", "cup", "cap", "union") or not in_text):
            return PLAIN[name]
        if name.replace(" ", "") in ("am", "pm") and " " in name + " ":
            return f'"{name.replace(" ", "")}"'
        if len(name) == 1 and (letters.isupper() or not in_text):
            return match[0]
        known = len(name) > 1 and name.rstrip("s") in UNITS
        return f'"{name}"' if in_text or known or len(name) > 3 else match[0]

    if in_text:
        text = re.sub(r"\b(and|or)\b", lambda m: PLAIN[m[0]], text)
        text = re.sub(r"(?<=[A-Z])\s*,\s*(?=[A-Z])", " , ", text)
        return re.sub(r"(?<!\\)\b[A-Za-z][A-Za-z.'/ -]*", word, text)
    parts = re.split(r'("[^"]*"|\\(?:begin|end)\s*\{\w+\*?\}|\\[a-zA-Z]+)', text)
    single = r"[aApP]\.? ?[mM]\b\.?|[A-Za-z]+"
    return "".join(p if i % 2 else re.sub(single, word, p) for i, p in enumerate(parts))


# ---- reading: an answer's structure --------------------------------------------------------------


class Unreadable(Exception):
    """Not mathematics that we know, or too large to be worked out."""


class Value(NamedTuple):
    """`kind` says what `data` is and what `parts` are the parts of."""

    kind: str  # expression, words, spelling, list, set, group, matrix, ratio, sets, relation
    data: Any = None
    parts: tuple = ()
    unit: str = ""


TOKEN = re.compile(r'\\(?:begin|end)\s*\{\w+\*?\}(?:\{[^{}]*\})?|\\[a-zA-Z]+|\\.|"[^"]*"|.')
OPEN, CLOSE = ("(", "[", "{", r"\{", r"\begin"), (")", "]", "}", r"\}", r"\end")
SET_OPERATORS = (r"\cup", r"\cap", r"\setminus")
RELATIONS = {"=": "=", r"\ne": "!=", "<": "<", r"\le": "<=", ">": ">", r"\ge": ">=", r"\in": "in"}
LABEL = re.compile(  # x, x_1, f(x), AB, \angle ABC, "area"
    r"(?:\"[^\"]*\"|\\(?:angle|triangle|overline|%s)|[A-Za-z](?:_\w|_\{\w+\})?|[{}' ])+"
    r"(?:\([A-Za-z0-9, ]*\))?" % GREEK.replace(" ", "|")
)
MATRIX = re.compile(r"(.*?)\\begin\s*\{(\w*matrix|array)\}(?:\{[^{}]*\})?(.*)\\end\s*\{\2\}")


def split(text: str, separators) -> tuple[list[str], list[str]]:
    """The parts of `text` between separators outside brackets, and those separators."""
    parts, found, depth, start = [], [], 0, 0
    for match in TOKEN.finditer(text):
        token = match[0][:6] if match[0].startswith(r"\begin") else match[0]
        token = r"\end" if token.startswith(r"\end") else token
        depth += (token in OPEN) - (token in CLOSE)
        if not 0 <= depth <= MAX_DEPTH:
            raise Unreadable
        if depth == 0 and token in separators:
            parts.append(text[start : match.start()].strip())
            found.append(token)
            start = match.end()
    if depth or len(parts) > MAX_ITEMS:
        raise Unreadable
    return [*parts, text[start:].strip()], found


def signs(text: str) -> list[str]:
    r"""The texts that one with \pm stands for."""
    pieces = re.split(r"(\\pm|\\mp)(?![a-zA-Z])", text)
    if len(pieces) > 9:
        raise Unreadable
    return list(
        dict.fromkeys(
            "".join(piece if i % 2 == 0 else choice[i // 2] for i, piece in enumerate(pieces))
            for choice in (
                [
                    ("+-" if sign == r"\pm" else "-+")[pick]
                    for sign, pick in zip(pieces[1::2], picks)
                ]
                for picks in product((0, 1), repeat=len(pieces) // 2)
            )
        )
    )


def read(text: str) -> Value:
    """The structure of a cleaned answer; what cannot be read is its spelling."""
    parts, commas = split(text, (",", ";", r"\or"))
    items = [read_item(each) for part in parts if part for each in signs(part)]
    if not items:
        raise Unreadable
    if len(items) == 1:
        return items[0]
    if set(commas) == {r"\or"} and all(
        item.kind == "relation" and "=" not in item.data for item in items
    ):
        return Value("sets", r"\cup", tuple(items))
    return Value("list", None, tuple(items))


read_cached = lru_cache(10_000)(read)


def read_item(text: str) -> Value:
    """One of a list: `text` has no commas outside brackets."""
    try:
        return read_structure(text)
    except Unreadable:
        return Value("spelling", re.sub(r'[\s"{}]', "", text))


def read_structure(text: str) -> Value:
    parts, found = split(text, RELATIONS)
    if found:
        return Value(
            "relation",
            tuple(RELATIONS[op] for op in found),
            tuple((part, read_structure(part)) for part in parts),
        )
    parts, found = split(text, SET_OPERATORS)
    if found:
        if len(set(found)) > 1 or "" in parts:
            raise Unreadable
        return Value("sets", found[0], tuple(map(read_structure, parts)))
    if text in (r"\emptyset", r"\{\}", r"\{ \}"):
        return Value("set")
    if text in (r"\mathbb{R}", r"\mathbb R"):
        return Value("group", "()", tuple(map(read_structure, (r"-\infty", r"\infty"))))
    parts, _ = split(text, (":",))
    if len(parts) == 2 and all(parts):
        value, unit = strip_unit(parts[1])
        return Value("ratio", None, (read_structure(parts[0]), read_structure(value)), unit)
    if match := MATRIX.fullmatch(text):
        return read_matrix(*match.groups())
    closed = text.startswith((r"\{", "(", "[", "{")) and encloses(text)
    if closed and text[0] != "{":
        width = 2 if text[0] == "\\" else 1
        inside, brackets = text[width:-width], text[0] + text[-1]
        condition = re.fullmatch(r"\s*([A-Za-z])\s*(?:\\mid|\||:)\s*(.*)", inside)
        if width == 2 and condition:
            return read(condition[2])
        parts, _ = split(inside, (",", ";"))
        if width == 2 or len(parts) > 1:
            items = tuple(read_structure(part) for part in parts)
            return Value("set", None, items) if width == 2 else Value("group", brackets, items)
    if closed:
        return read_structure(text[1:-1].strip())
    if base := re.fullmatch(r"(\w+)\s*_\s*(?:(\d+)|\{\s*(\d+)\s*\})", text):
        if base[1][0].isdigit() or len(base[1]) > 1:
            return Value("base", (base[1].lower(), int((base[2] or base[3])[:4])))
    if words := re.fullmatch(r'"([^"]*)"(?:\s*"[^"]*")*', text):
        if words[1] in COUNTS:
            return Value("expression", read_leaf(str(COUNTS.index(words[1]))))
        return Value("words", text.replace('"', ""))
    text, unit = strip_unit(text)
    magnitude = MAGNITUDES.get(unit.split(" ")[0], 0)
    if magnitude:
        text, unit = rf"({text})\cdot 10^{{{magnitude}}}", unit.partition(" ")[2]
    return Value("expression", read_leaf(text), (), unit)


def encloses(text: str) -> bool:
    """Whether the first bracket closes with the last character."""
    depth = 0
    for match in TOKEN.finditer(text):
        depth += (match[0] in OPEN) - (match[0] in CLOSE)
        if depth == 0:
            return match.end() == len(text)
    return False


def strip_unit(text: str) -> tuple[str, str]:
    """What stands before words at the end, and those words, spelled in one way."""
    match = re.fullmatch(r'(.*?[^\s"^])\s*((?:\\degree|"[^"]*"(?:\s*\^\s*\{?\d\}?)?|[/\s])+)', text)
    if not match:
        return text, ""
    unit = re.sub(r"\^\s*\{?2\}?", " square ", match[2].replace(r"\degree", " degree "))
    unit = re.sub(r"\^\s*\{?3\}?", " cubic ", unit)
    words = [UNITS.get(w) or UNITS.get(w.rstrip("s"), w) for w in re.findall(r"[^\s\"./]+", unit)]
    return match[1], " ".join(sorted(words, key=lambda w: (w not in MAGNITUDES, w)))


def read_matrix(factor: str, kind: str, body: str) -> Value:
    rows = [split(row, ("&",))[0] for row in split(body, (r"\cr",))[0] if row]
    if len({len(row) for row in rows}) != 1:
        raise Unreadable
    cells = [f"({factor})*({cell})" if factor else cell for row in rows for cell in row]
    kind = "det" if kind == "vmatrix" else "matrix"
    return Value("matrix", (kind, len(rows)), tuple(map(read_structure, cells)))


# ---- leaves: trees of placeholders by a grammar, numbers within bounds by us ---------------------

LEAF = re.compile(
    r"\s*(?:(?P<number>\d+(?:\.\d*)?|\.\d+)|(?P<name>[A-Za-z](?:_(?:\w|\{\w+\}))?"
    rf"|\\(?:{GREEK.replace(' ', '|')}|pi|infty|degree)(?![a-zA-Z]))"
    rf"|(?P<function>\\(?:{'|'.join(FUNCTIONS)}|lfloor|rfloor|lceil|rceil)(?![a-zA-Z]))"
    r"|(?P<braced>\\(?:frac|binom|sqrt)(?![a-zA-Z])|[\^_])"
    r"|(?P<sign>\\(?:cdot|times|div)(?![a-zA-Z])|[-+*/!|])|(?P<open>[({\[])|(?P<close>[)}\]]))"
)


def read_leaf(text: str):
    """A sympy expression. Raises Unreadable, also where anything of `text` is left over."""
    import sympy
    from latex2sympy2_extended.latex2sympy2 import ConversionConfig, latex2sympy

    constants = {"e": sympy.E, "i": sympy.I, r"\pi": sympy.pi, r"\infty": sympy.oo}
    constants[r"\degree"] = sympy.pi / 180
    table, output, stack = {}, [], []
    position, wanted, before, log = 0, 0, "", False
    text = text.strip()
    while position < len(text):
        match = LEAF.match(text, position)
        if not match or len(output) > MAX_TOKENS or len(stack) > MAX_DEPTH:
            raise Unreadable
        kind, token, position = match.lastgroup, match[match.lastgroup], match.end()
        if kind in ("number", "name"):
            if kind == "number" and (wanted == 2 or log) and token.isdigit():
                position -= len(token) - 1  # \frac12, \log_28
                token = token[0]
            if kind == "number" and (before == "number" or len(token) > MAX_DIGITS):
                raise Unreadable
            value = (
                sympy.Rational(token)
                if kind == "number"
                else (constants.get(token) or sympy.Symbol(token.replace("{", "").replace("}", "")))
            )
            holder = f"v{len(table)}"
            table[holder] = value
            symbol = rf"\variable{{{holder}}}"
            output.append(f"{{{symbol}}}" if wanted else symbol)
            kind = "name" if wanted else kind
            wanted = max(wanted - 1, 0)
        elif kind == "braced":
            if token == "^" and before == "^":
                raise Unreadable
            log = token == "_" and output[-1:] == [r"\log "]
            if token == "_" and not log or wanted and token in "^_":
                raise Unreadable
            if wanted:  # \frac\sqrt2 3
                raise Unreadable
            output.append(token)
            wanted = 2 if token in (r"\frac", r"\binom") else 1
        elif kind == "open":
            root = token == "[" and output[-1:] == [r"\sqrt"]
            brace = "[" if root else "{" if wanted and token == "{" else "{(" if wanted else "("
            after = wanted if root else wanted - 1
            stack.append((brace, after if wanted else 0, before_of(output, brace)))
            output.append(brace)
            wanted = 0
        elif kind == "close":
            if wanted or not stack:
                raise Unreadable
            brace, wanted, power = stack.pop()
            output.append({"[": "]", "{": "}", "{(": ")}", "(": ")"}[brace])
            kind = "^" if power else "close"
        elif wanted and not (token == "-" and output[-1:] == ["^"]):
            raise Unreadable
        else:
            output.append(token + " ")
        before = kind
    if stack or wanted or not table:
        raise Unreadable
    if len(table) == 1 and output == [r"\variable{v0}"]:
        return table["v0"]
    try:
        tree = latex2sympy(
            "".join(output),
            normalization_config=None,
            conversion_config=ConversionConfig(lowercase_symbols=False),
        )
    except (MemoryError, RecursionError):
        raise
    except Exception:  # the grammar's own errors are plain Exceptions
        raise Unreadable from None
    return evaluate(tree, table)


def before_of(output: list[str], brace: str) -> bool:
    return brace in ("{", "{(") and output[-1:] == ["^"]


def evaluate(tree, table):
    """A tree of placeholders worked out from its leaves; no number on the way has more than
    MAX_BITS bits, or Unreadable is raised."""
    import sympy

    if not isinstance(tree, sympy.Expr):
        raise Unreadable
    if tree.is_Symbol:
        return table[tree.name]
    if not tree.args:
        return tree
    args = [evaluate(arg, table) for arg in tree.args]
    if tree.func in (sympy.factorial, sympy.binomial):
        if any(
            arg.is_number and not (arg.is_Integer and abs(arg) <= MAX_FACTORIAL) for arg in args
        ):
            raise Unreadable
    if tree.is_Pow or tree.func is sympy.exp:
        base, power = args if tree.is_Pow else (sympy.E, args[0])
        if power.is_number and power.is_finite:
            size = abs(power.evalf(15))
            weight = (
                abs(sympy.log(abs(base)).evalf(15))
                if base.is_number and base
                else sympy.Integer(20)
            )
            if not (size.is_Float or size.is_Integer) or size > 10_000:
                raise Unreadable
            if weight.is_number and weight.is_finite and size * weight > MAX_BITS:
                raise Unreadable
    value = tree.func(*args)
    if value.has(sympy.nan, sympy.zoo):
        raise Unreadable
    if value.is_Rational and max(abs(value.p), value.q).bit_length() > MAX_BITS:
        raise Unreadable
    return value


# ---- comparing -----------------------------------------------------------------------------------


def equal(answer: str, reference: str) -> bool:
    """Whether two answers, as written, are the same; every convention is in docs/grading.md."""
    answer, reference = clean(answer), clean(reference)
    if not answer or not reference:
        return False
    if spelling(answer) == spelling(reference):
        return True
    try:
        # "1,234" is a number, unless the reference shows ("100, 234") that commas part a list.
        if not re.search(r"\d, \d{3}(?!\d)", reference):
            answer, reference = map(join_thousands, (answer, reference))
        return same(read_cached(answer), read_cached(reference))
    except Unreadable:
        return False


def spelling(text: str) -> str:
    return re.sub(r'[\s"]', "", text)


def join_thousands(text: str) -> str:
    pattern = r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?![\d,]\d|\d)"
    top, found = split(text, (",",))
    if not found:
        return text
    return re.sub(pattern, lambda m: m[0].replace(",", ""), text) if text[0] not in "([\\" else text


def same(a: Value, b: Value) -> bool:
    """Whether an answer `a` is what a reference `b` is."""
    if same_sets(a, b):
        return True
    if a.kind == b.kind == "relation" and same_relations(a, b):
        return True
    if a.kind == "relation" or b.kind == "relation":
        (label_a, a), (label_b, b) = without_label(a), without_label(b)
        labels_agree = label_a == label_b or not label_a or not label_b
        return labels_agree and "relation" not in (a.kind, b.kind) and same(a, b)
    if a.unit in UNITS.values() and b.unit in UNITS.values() and a.unit != b.unit:
        return False
    if ({a.unit, b.unit} & {"am", "pm"}) and a.unit != b.unit:
        return False
    if (
        {a.kind, b.kind} <= {"list", "set"}
        or "set" in (a.kind, b.kind)
        or "list" in (a.kind, b.kind)
    ):
        lists = [v.parts if v.kind in ("list", "set") else (v,) for v in (a, b)]
        if "set" in (a.kind, b.kind):
            lists = [distinct(each) for each in lists]
        return same_in_any_order(*lists)
    if a.kind != b.kind:
        return same_digits(a, b) or same_digits(b, a)
    if a.kind == "expression":
        return same_expressions(a.data, b.data)
    if a.kind == "base":
        (digits, base), (digits_b, base_b) = a.data, b.data
        return max(base, base_b) <= 36 and int(digits, base) == int(digits_b, base_b)
    if a.kind == "sets" and a.data in (r"\cup", r"\cap"):
        return a.data == b.data and same_in_any_order(a.parts, b.parts)
    return (
        a.data == b.data
        and len(a.parts) == len(b.parts)
        and (a.parts or a.data is not None)
        and all(map(same, a.parts, b.parts))
    )


def same_digits(a: Value, b: Value) -> bool:
    """143 for 143_5: the question fixes the base."""
    return a.kind == "base" and b.kind == "expression" and a.data[0] == str(b.data).lower()


def same_in_any_order(parts: tuple, others: tuple) -> bool:
    left = list(others)
    for part in parts:
        match = next((i for i, other in enumerate(left) if same(part, other)), None)
        if match is None:
            return False
        del left[match]
    return not left


def distinct(parts: tuple) -> tuple:
    kept: list[Value] = []
    for part in parts:
        if not any(same(part, other) for other in kept):
            kept.append(part)
    return tuple(kept)


def without_label(value: Value) -> tuple[str, Value]:
    r"""("x", 5) of x = 5, 5 = x, x = 2 + 3 = 5 and x \in 5; ("", value) of anything else."""
    if value.kind != "relation" or set(value.data) - {"=", "in"}:
        return "", value
    texts, parts = zip(*value.parts)
    if not LABEL.fullmatch(texts[0]):
        if len(parts) == 2 and value.data == ("=",) and LABEL.fullmatch(texts[1]):
            return spelling(texts[1]), parts[0]
        if not all(same(part, parts[-1]) for part in parts):
            return "", value
        return "", parts[-1]
    if not all(same(part, parts[-1]) for part in parts[1:]):
        return "", value
    return spelling(texts[0]), parts[-1]


def same_relations(a: Value, b: Value) -> bool:
    """The same relations up to a factor on both sides: 2x < 6 and 3 > x, 2x + y = 1 and 4x + 2y = 2."""
    import sympy

    chains = []
    for value in (a, b):
        chain = []
        for op, (_, left), (_, right) in zip(value.data, value.parts, value.parts[1:]):
            if left.kind != "expression" or right.kind != "expression" or op == "in":
                return False
            flipped = op[0] == ">"
            op = op.replace(">", "<")
            chain.append((op, (left.data - right.data) * (-1 if flipped else 1)))
        chains.append(chain)
    if len(chains[0]) != len(chains[1]):
        return False

    def matches(one, other) -> bool:
        if (
            one[0] != other[0]
            or not one[1].free_symbols
            or one[1].free_symbols != other[1].free_symbols
        ):
            return False
        ratios = [probe(one[1] / other[1], i) for i in range(3)]
        ratios = [ratio for ratio in ratios if ratio is not None]
        if not ratios or any(abs(ratio - ratios[0]) > abs(ratio) * TINY for ratio in ratios):
            return False
        ratio = sympy.simplify(one[1] / other[1])
        return bool(ratio.is_number and ratio != 0 and (one[0] in ("=", "!=") or ratio.is_positive))

    return all(any(matches(one, other) for other in chains[1]) for one in chains[0]) and all(
        any(matches(one, other) for one in chains[0]) for other in chains[1]
    )


def same_sets(a: Value, b: Value) -> bool:
    """Sets of real numbers written as intervals, unions or inequalities in one variable."""
    kinds = {a.kind, b.kind}
    if not kinds & {"relation", "sets"} and not (kinds == {"group", "set"}):
        return False
    try:
        (name_a, set_a), (name_b, set_b) = real_set(a), real_set(b)
        return (name_a == name_b or not name_a or not name_b) and bool(
            set_a == set_b or set_a.symmetric_difference(set_b).is_empty
        )
    except (Unreadable, TypeError, ValueError, NotImplementedError):
        return False


def real_set(value: Value):
    """(variable or "", sympy set); raises Unreadable for what is no set of real numbers."""
    import sympy

    if value.kind == "group" and len(value.parts) == 2:
        low, high = (real_number(part) for part in value.parts)
        if low > high:
            raise Unreadable
        return "", sympy.Interval(low, high, value.data[0] == "(", value.data[1] == ")")
    if value.kind == "set":
        return "", sympy.FiniteSet(*map(real_number, value.parts))
    if value.kind == "sets":
        names, sets = zip(*map(real_set, value.parts))
        if len(set(names)) > 1:
            raise Unreadable
        union = {r"\cup": sympy.Union, r"\cap": sympy.Intersection, r"\setminus": sympy.Complement}
        return names[0], union[value.data](*sets)
    if value.kind != "relation":
        raise Unreadable
    result, name = sympy.S.Reals, ""
    for op, (left_text, left), (_, right) in zip(value.data, value.parts, value.parts[1:]):
        if op == "in":
            name, piece = left_text, real_set(right)[1]
        else:
            flip = {"<": ">", "<=": ">=", ">": "<", ">=": "<="}
            if left.kind != "expression" or right.kind != "expression" or op == "=":
                raise Unreadable
            if not left.data.is_Symbol:
                left, right, op = right, left, flip.get(op, op)
            if not left.data.is_Symbol or name not in ("", left.data.name):
                raise Unreadable
            name, bound = left.data.name, real_number(right)
            piece = {
                "<": sympy.Interval.open(-sympy.oo, bound),
                "<=": sympy.Interval(-sympy.oo, bound),
                ">": sympy.Interval.open(bound, sympy.oo),
                ">=": sympy.Interval(bound, sympy.oo),
                "!=": sympy.Complement(sympy.S.Reals, sympy.FiniteSet(bound)),
            }[op]
        result = result.intersect(piece)
    return name, result


def real_number(value: Value):
    if value.kind != "expression" or not value.data.is_number or not value.data.is_extended_real:
        raise Unreadable
    return value.data


TINY = 1e-25  # of values worked out to 50 digits: only says what cannot be equal


def probe(expression, number: int):
    """The expression's value to 50 digits at the `number`th point, or None where it has none."""
    import sympy

    points = ("0.7310585", "1.9134172", "-0.6180339", "2.2360679", "-1.4142135")
    symbols = sorted(expression.free_symbols, key=lambda symbol: symbol.name)
    values = {
        symbol: sympy.Float(points[(number + i) % len(points)], 50) * (1 + sympy.Rational(i, 7))
        for i, symbol in enumerate(symbols)
    }
    value = expression.xreplace(values).evalf(50)
    return value if value.is_number and value.is_finite and not value.has(sympy.nan) else None


def same_expressions(a, b) -> bool:
    """Exact: values at a few points can only tell expressions apart, a proof makes them equal."""
    import sympy

    if a == b:
        return True
    if a.is_Rational and b.is_Rational or a.is_infinite or b.is_infinite:
        return False
    for number in range(3):
        one, other = probe_pair(a, b, number)
        if one is not None and other is not None:
            if abs(one - other) > TINY * max(abs(one), abs(other)):
                return False
    difference = sympy.expand(a - b)
    if difference == 0:
        return True
    difference = sympy.simplify(difference)
    return difference == 0 or bool(difference.is_number and difference.equals(0))


def probe_pair(a, b, number: int) -> tuple:
    """Both at the same point: a symbol that only one has must not move the others'."""
    symbols = a.free_symbols | b.free_symbols
    padding = sum(symbols, start=a * 0)
    return tuple(probe(each + padding, number) for each in (a, b))


# ---- the worker: this process --------------------------------------------------------------------


def serve() -> None:
    """Answers lines of JSON [answer, reference] with a line true or false until stdin ends."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT, MEMORY_LIMIT))
    parent = os.getppid()

    def watch() -> None:  # a copy of the pipe in a forked process would hold it open
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(0)

    threading.Thread(target=watch, daemon=True).start()
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # nothing that a library prints is a reply
    import latex2sympy2_extended.latex2sympy2  # noqa: F401

    replies.write("ready\n")
    for line in sys.stdin:
        replies.write(json.dumps(equal(*json.loads(line))) + "\n")


# ---- asking it: the other process ----------------------------------------------------------------


class Worker:
    """A lazily started `python -m common.equivalence`, used from any thread, one pair at a time."""

    def __init__(self) -> None:
        self.failures = {"timeout": 0, "crash": 0}
        self.reset()
        os.register_at_fork(after_in_child=self.reset)  # a forked process starts its own

    def reset(self) -> None:
        self.lock, self.process = threading.Lock(), None

    def equal(self, answer: str, reference: str) -> bool:
        """False too where the worker dies or takes too long: counted in `failures`, and said."""
        with self.lock:
            failure = "crash"
            try:
                if self.process is None:
                    self.start()
                self.process.stdin.write(json.dumps([answer, reference]).encode() + b"\n")
                self.process.stdin.flush()
                reply = self.read_line(TIME_LIMIT)
                if reply in (b"true\n", b"false\n"):
                    return reply == b"true\n"
                failure = "timeout" if reply is None else "crash"
            except BrokenPipeError:
                pass
            self.stop()
            self.failures[failure] += 1
            print(
                f"warning: grading {answer!r:.80} against {reference!r:.80}: {failure}, counts as "
                f"wrong ({self.failures})",
                file=sys.stderr,
                flush=True,
            )
            return False

    def start(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "common.equivalence"],
            cwd=os.path.dirname(os.path.dirname(os.path.abspath(__file__))),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for the one that trains
        )
        if self.read_line(START_LIMIT) != b"ready\n":
            self.stop()
            raise RuntimeError("python -m common.equivalence does not start: see above")

    def read_line(self, seconds: float) -> bytes | None:
        """A line, b"" at the end of the pipe, None when time is up."""
        ready, _, _ = select.select([self.process.stdout], [], [], seconds)
        return self.process.stdout.readline() if ready else None

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process.stdin, self.process.stdout, self.process = None, None, None


if __name__ == "__main__":
    serve()
