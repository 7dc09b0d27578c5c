r"""What a MATH answer says: its text -> a `Value`, compared in equivalence.py.

`clean` turns many spellings into few. `read` takes the structure apart (lists, sets, intervals,
relations, matrices, units, ...). `read_leaf` gives the rest, with placeholders for numbers, to
latex2sympy2_extended, the grammar of math-verify; `evaluate` then puts the numbers in, within
bounds, so that 9^{9^{9}} is never computed. No text is run as code, and none is skipped: what
cannot be read to its end is a spelling, equal only to itself.
"""

# ruff: noqa: RUF001, SIM905 (letters that look alike are the point; tables of words)

import re
import unicodedata
from functools import lru_cache
from itertools import product
from typing import Any, NamedTuple

import sympy
from latex2sympy2_extended.latex2sympy2 import ConversionConfig, latex2sympy

MAX_DIGITS, MAX_TOKENS, MAX_DEPTH, MAX_ITEMS = 200, 300, 20, 50  # limits on what is read
MAX_BITS, MAX_FACTORIAL = 32_000, 3_000  # limits on what is computed


class Unreadable(Exception):
    """Not mathematics that this code knows, or too large to compute."""


# ---- cleaning ------------------------------------------------------------------------------------

SYMBOLS = r"""− - – - × \times · \cdot ⋅ \cdot ÷ \div π \pi ∞ \infty √ \sqrt ° ^\circ ± \pm ≤ \le
≥ \ge ≠ \ne ∪ \cup ∩ \cap ∈ \in ∅ \emptyset θ \theta α \alpha β \beta ℝ \mathbb{R} € \$ £ \$
¢ cents ≈ \approx ’ ' ′ ' ⟨ ( ⟩ ) º ^\circ ˚ ^\circ ⁄ / ∕ / ∶ :""".split()
SYMBOLS = {'"': " "} | dict(zip(SYMBOLS[::2], SYMBOLS[1::2], strict=True))
GREEK = "alpha beta gamma delta epsilon varepsilon zeta eta theta kappa lambda mu nu xi rho sigma "
GREEK += "tau phi varphi chi psi omega Gamma Delta Theta Lambda Sigma Phi Psi Omega ell"
GREEK = GREEK.replace(" ", "|")
FUNCTIONS = "sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh ln log exp".split()
# Plain words that mean a command; units by their spellings (an answer may leave its unit out, but
# not give another one); and numbers as words.
PLAIN = {name: rf"\{name} " for name in [*FUNCTIONS, "sqrt", "pi", "theta"]}
PLAIN |= {"and": r" \and ", "or": r" \or ", "union": r"\cup "}
PLAIN |= dict.fromkeys(("infinity", "inf", "oo"), r"\infty ")
UNITS = {}
for _spellings in """centimeter cm centimetre|meter m metre|millimeter mm|kilometer km kilometre
|inch in inche|foot ft feet|yard yd|mile mi|gram g gm|kilogram kg|pound lb|ounce oz|second s sec
|minute min|hour hr h|day|week|month|year yr|cent|dollar usd buck|degree deg|percent pct|per|euro
|acre|liter litre l|gallon gal|radian rad|unit|square sq|cubic cu|am|pm""".split("|"):
    UNITS |= dict.fromkeys(_spellings.split(), _spellings.split()[0])
UNITS["mph"] = "hour mile per"
MAGNITUDES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
COUNTS = "zero one two three four five six seven eight nine ten eleven twelve".split()

NOISE = re.compile(
    r"\\(?:left|right)\s*\.|\\(?:phantom|hspace)\s*(?:\{[^{}]*\}|.)|\\[()\[\]]"
    r"|\\(?:left|right|middle|[bB]igg?[lmr]?|displaystyle|textstyle|q?quad|bf|rm|it|boxed|fbox"
    r"|bm|boldsymbol|underline|[lL]arge|LARGE|[hH]uge)(?![a-zA-Z])|\\(?:text)?color\s*\{\w+\}"
    r"|\\math(?:bf|rm)(?=\s*\{[^{}]*\{)"  # around more than a word
    r"|\b(?:[Oo]ption|[Cc]hoice|[Gg]raph|[Tt]he answer is) (?=\(?[A-Z]\b)"
)
TEXT = re.compile(
    r"\\(?:text(?:bf|it|rm|sf|tt|sc|normal)?|emph|[mh]box|math(?:rm|bf|it|sf|tt)|operatorname\*?)"
    r"\s*\{([^{}]*)\}"
)
SCRIPTS = re.compile("([⁻⁰¹²³⁴-⁹]+)|([₀-₉]+)")
ROW_END = re.compile(r"\\\\(?:\s*\[\d*\.?\d+(?:ex|em|pt|mm)\])?")
THOUSANDS = re.compile(
    r"(?<=\d)(?:\{,\}(?: |\\!)?|,?(?: ?\\!)+ ?|\\[,;: ]|\{\\,\}|\\thinspace |~|'| )"
    r"(?=\d{3}(?![\d/]))"
)
DOLLAR = r'(?:(?:"us"|US|)\s*\\\$|"usd"|USD|\\(?:text|math)dollar(?![a-z]))'
DOLLARS = re.compile(rf"{DOLLAR}\s*([\d.,]*\d)|(?<![\d.,])([\d.,]*\d)\s*\\\$(?!\s*[\d.])")
MIXED = re.compile(r"(?<![\w.^)}/])(\d+)\s*(\{)?\\frac\{(\d{1,9})\}\{(\d{1,9})\}(?(2)\})")
REALS = r"\\mathbb\s*(?:R|\{\s*R\s*\})"
GROUP = r"((?:[^{}]|\{[^{}]*\})+)"  # with braces in it
REPEATING = re.compile(
    r"(\d*)\.(\d*)\\(?:overline|bar|dot)\s*\{?(\d+)\}?|(\d+)\.()\((\d+)\)"
    r"|(\d*)\.(\d{0,9}?)(\d{1,6}?)\9{2,}(?:\\[lc]?dots|\.\.\.)"
)
# In this order; a replacement that ends in a command gets a space.
RENAMES = r"""
\\(?:[dtc]|nice|s)frac => \\frac
\{<group>\\over(?![a-z])<group>\} => {\\frac{\1}{\2}}
\\dbinom => \\binom
\{([^{}]+)\\choose([^{}]+)\} => \\binom{\1}{\2}
(?:\\geq?(?:slant|q)?(?![a-z])|>=) => \\ge
(?:\\leq?(?:slant|q)?(?![a-z])|<=) => \\le
(?:\\neq|!=) => \\ne
\\gt(?![a-z]) => >
\\lt(?![a-z]) => <
\\varnothing => \\emptyset
\\lbrace(?![a-z]) => \\{
\\rbrace(?![a-z]) => \\}
\\langle => (
\\rangle => )
\\[lr]?vert(?![a-z]) => |
\\colon(?![a-z]) => :
\{:\} => :
\*\* => ^
\+ ?/ ?- => \\pm
\\lor(?![a-z])|\\vee(?![a-z]) => \\or
\\land(?![a-z])|\\wedge(?![a-z]) => \\and
\\not\s*= => \\ne
&\s*= => =
\\bigcup => \\cup
([)\]}])\s*U\s*(?=[(\[\\{]) => \1\\cup
\\(?:backslash|smallsetminus)(?![a-z])|(?<=\})\s*-\s*(?=\\\{) => \\setminus
^\s*[A-Za-z]\s*\\in\s*<reals>\s*,|,\s*[A-Za-z]\s*\\in\s*<reals>$ =>
\\(begin|end)\s*\{([pb]?)matrix\*\}(?:\[[lcr]\])? => \\\1{\2matrix}
[(\[]\s*(\\begin\s*\{(array|matrix|smallmatrix)\}.*?\\end\s*\{\2\})\s*[)\]] => \1
\\measuredangle => \\angle
\\(sin|cos|tan)\s*\^\s*\{?-1\}? => \\arc\1
(?:\{\})?\^\s*(?:\\circ|\\degree|\{\s*\\circ\s*\})\s*(?:[CFK](?![a-zA-Z]))? => \\degree
(?<=[\d}])\^\s*(?:o|"o"|\{\s*(?:o|"o")\s*\})(?!\w)|\\textdegree => \\degree
\^\s*\{?\s*"?(?:th|st|nd|rd)"?\s*\}? =>
\\?% => "percent"
\\sqrt\s*(\d+(?:\.\d+)?) => \\sqrt{\1}
\\frac\s*(\d)\s*(\d) => \\frac{\1}{\2}
\\frac\s*(\d)\s*\{ => \\frac{\1}{
\\frac\s*\{\s*([^{}]*?)\s*\}\s*(?:(\d)|\{\s*([^{}]*?)\s*\}) => \\frac{\1}{\2\3}
(?<![\w.^)}/])(\d+) +(\d+)/(\d+)(?![\w.!^/]) => \1\\frac{\2}{\3}
(?<![\w.^)}/])(\d+)\s*/\s*(\d+)(?![\d.!^]) => \\frac{\1}{\2}
(?<![\w.])(\d+\.?\d*)(?:e|E\+?|e\+(?=0))(\d{1,3})(?![\w.]) => \1\\cdot10^{\2}
(?<![\w.])(\d+\.?\d*)(?:E|e(?=-0))-(\d{1,3})(?![\w.]) => \1\\cdot10^{-\2}
\^\s*(-\s*\w+) => ^{\1}
^\s*"?(?:the )?(?:final )?answer(?: is)?"?\s*:?(?=.) =>
^\s*"(?:[^"]* (?:is|are)"\s*:?|[^"]*"\s*:)(?=.) =>
^\s*(?:\\(?:approx|sim|therefore|implies|Rightarrow)(?![a-z])|=) =>
(?<=\d)(?: to |\s*"to"\s*)(?=\d) => :
(?<![\d:])(\d{1,2}):00\s*(?="[ap]m") => \1
_\s*\{\s*\(\s*(\d{1,2})\s*\)\s*\} => _{\1}
^\s*(-?)[({]\s*(-?[\dA-F.]+)\s*[)}]\s*(?=_) => \1\2
(?<=[\dA-F])\s*(?:\(|_\s*\{)\s*"(?:in )?base"\s*(\d{1,2})\s*[)}] => _{\1}
(?<=[\dA-F])\s*"(?:in )?base"\s*(\d{1,2}) => _{\1}
(?:\s|(?<!\.)\.|:|\\cr)+$ =>
^\s*\(?([A-Za-z])\)$ => \1
"""
RENAMES = RENAMES.replace("<group>", GROUP).replace("<reals>", REALS)
RENAMES = [line.partition(" =>") for line in RENAMES.strip().splitlines()]
RENAMES = [
    (re.compile(old), re.sub(r"(\\\\[a-z]+(?:\\1)?)$", r"\1 ", new[1:])) for old, _, new in RENAMES
]


@lru_cache(10_000)
def clean(text: str) -> str:
    """One spelling for those that mean the same; words become `"words"` in lower case."""
    text = "".join(map(clean_character, SCRIPTS.sub(clean_script, text)))
    text = NOISE.sub(" ", ROW_END.sub(r"\\cr ", text))
    for _ in range(3):  # \text in \textbf
        text = TEXT.sub(lambda match: f" {clean_words(match[1], in_text=True)} ", text)
    text = re.sub(r'"\s*"', " ", clean_words(text, in_text=False))
    text = THOUSANDS.sub("", REPEATING.sub(clean_repeating, text))
    text = DOLLARS.sub(lambda match: f'{match[1] or match[2]}"dollar"', text)
    text = re.sub(r"\\[,;:! ]|~|\\?\$", " ", text)
    for pattern, new in RENAMES:
        text = pattern.sub(new, text)
    text = re.sub(r"\s+", " ", MIXED.sub(clean_mixed, text)).strip()
    for _ in range(3):  # braces around all of it mean nothing
        if text.startswith("{") and enclosed(text):
            text = text[1:-1].strip()
    return text


def clean_character(char: str) -> str:
    kind, _, codes = unicodedata.decomposition(char).partition(" ")
    if unicodedata.category(char) == "Cf":  # invisible, as a zero-width space
        return ""
    if kind not in ("<super>", "<sub>", "<fraction>"):
        return SYMBOLS[char] + " " if char in SYMBOLS else unicodedata.normalize("NFKC", char)
    plain = "".join(chr(int(code, 16)) for code in codes.split()).replace("−", "-")
    above, _, below = plain.partition("\u2044")
    return {"<super>": f"^{{{plain}}}", "<sub>": f"_{{{plain}}}"}.get(
        kind, rf"\frac{{{above}}}{{{below}}}"
    )


def clean_script(match: re.Match) -> str:
    """2¹⁰⁰ is 2^{100}, 10₁₂ is 10_{12}."""
    plain = unicodedata.normalize("NFKC", match[0]).replace("−", "-")
    return f"^{{{plain}}}" if match[1] else f"_{{{plain}}}"


def clean_words(text: str, in_text: bool) -> str:
    r"""Cleans runs of letters: commands, separators, words; outside \text, products of symbols."""

    def clean_word(match: re.Match) -> str:
        name = re.sub(r"[.\s]+", " ", match[0].lower()).strip()
        after = match.string[max(match.start() - 1, 0) : match.start()]
        is_unit = in_text or after in [*"0123456789) }"]  # 5 cm, but not \frac{cm}{2}
        if name in PLAIN:
            return PLAIN[name]
        if name in ("a m", "p m", "am", "pm") and is_unit:
            return f'"{name.replace(" ", "")}"'
        if in_text:
            return match[0] if re.fullmatch(r"[A-Z]\.?\s*", match[0]) else f'"{name}"'
        is_unit = is_unit and len(name) > 1 and name.rstrip("s") in UNITS
        return f'"{name}"' if is_unit or len(name) > 3 else match[0]

    if in_text:
        text = re.sub(r"\b(and|or)\b", lambda match: PLAIN[match[0]], text)
        return re.sub(r"(?<!\\)\b[A-Za-z][A-Za-z.'/ -]*", clean_word, text)
    parts = re.split(r'("[^"]*"|\\(?:begin|end)\s*\{\w+\*?\}|\\[a-zA-Z]+)', text)
    for i in range(0, len(parts), 2):
        parts[i] = re.sub(r"(?<=\d) ?[aApP]\.? ?[mM]\b\.?|[A-Za-z]+", clean_word, parts[i])
    return "".join(parts)


def clean_mixed(match: re.Match) -> str:
    r"""2\frac{1}{2} is a sum, 2\frac{3}{2} a product."""
    whole, _, above, below = match.groups()
    sign = "+" if int(above) < int(below) else r"\cdot"
    return rf"({whole}{sign}\frac{{{above}}}{{{below}}})"


def clean_repeating(match: re.Match) -> str:
    r"""0.1\overline{6}, 0.(6), 0.666...: (0.1 + 6/90)."""
    whole, fraction, block = (group for group in match.groups() if group is not None)
    below = "9" * len(block) + "0" * len(fraction)
    return rf"({whole or 0}.{fraction}0+\frac{{{block}}}{{{below}}})"


# ---- structure -----------------------------------------------------------------------------------


class Value(NamedTuple):
    r"""kind         data                     parts
    expression   sympy expression
    words        the words
    spelling     what could not be read
    list, set                             the items, in any order
    group        the brackets, "[)"       the items, in order
    matrix       (kind, number of rows)   the cells, row after row
    ratio                                 the two sides of a colon, also of a time
    base         (digits, base)
    sets         \cup, \cap, \setminus    the sets between them
    relation     the signs                the sides between them, each a Value
    choice       the letter               the letter and what comes after it: (C) 12
    """

    kind: str
    data: Any = None
    parts: tuple = ()
    unit: str = ""
    text: str = ""


TOKEN = re.compile(r'\\(?:begin|end)\s*\{\w+\*?\}(?:\{[^{}]*\})?|\\[a-zA-Z]+|\\.|"[^"]*"|.')
OPEN, CLOSE = re.compile(r"[(\[{]|\\\{|\\begin"), re.compile(r"[)\]}]|\\\}|\\end")
SEPARATORS = (",", ";", r"\and", r"\or")
RELATIONS = {"=": "=", r"\ne": "!=", "<": "<", r"\le": "<=", ">": ">", r"\ge": ">=", r"\in": "in"}
MATRIX = r"(.*?)\s*(?:\\cdot|\\times|\*)?\s*\\begin\s*\{(\w*matrix|array)\}(?:\{[^{}]*\})?"
MATRIX = re.compile(MATRIX + r"(.*)\\end\s*\{\2\}")
BASE = rf'(-?\d[\w.]*|[A-F0-9]{{2,}})\s*_\s*\{{?\s*(?:(\d{{1,2}})|"?({"|".join(COUNTS)})"?)\s*\}}?'
BASE = re.compile(BASE, re.ASCII)
CONDITION = re.compile(rf"[A-Za-z]\s*(?:\\in\s*{REALS}\s*)?(?:\\mid|\||:)(.*)")
WORD = r'(?:\\degree|"[^"]*"(?:\s*\^\s*\{?\d\}?)?)'
UNIT = re.compile(rf'(.*?[^\s"^])\s*({WORD}(?:{WORD}|[/\s])*)')


def split(text: str, separators) -> tuple[list[str], list[str]]:
    """The parts of `text` between separators outside brackets, and those separators."""
    parts, found, depth, start = [], [], 0, 0
    for match in TOKEN.finditer(text):
        depth += bool(OPEN.match(match[0])) - bool(CLOSE.match(match[0]))
        if not 0 <= depth <= MAX_DEPTH or len(parts) > MAX_ITEMS:
            raise Unreadable
        if depth == 0 and match[0] in separators:
            parts.append(text[start : match.start()].strip())
            found.append(match[0])
            start = match.end()
    if depth:
        raise Unreadable
    return [*parts, text[start:].strip()], found


@lru_cache(10_000)
def read(text: str, thousands: bool = False) -> Value:
    r"""The structure of a cleaned answer; "1,234" is a number if `thousands`. An item of a list is
    a spelling if it cannot be read; unbalanced brackets raise Unreadable."""
    if thousands and not text.startswith(("(", "[", r"\{")):
        text = re.sub(
            r"(?<![\w.,(\[])(?<![(\[]-)\d{1,3}(?:,\d{3})+(?!,?\d)",
            lambda match: match[0].replace(",", ""),
            text,
        )
    parts, found = split(text, SEPARATORS)
    items = [read_item(each) for part in parts if part for each in choose_signs(part, ("\\{",))]
    if not 1 <= len(items) <= MAX_ITEMS:
        raise Unreadable
    operator = {r"\and": r"\cap", r"\or": r"\cup"}.get("".join(set(found)))
    if operator and all(item.kind == "relation" and "=" not in item.data for item in items):
        return Value("sets", operator, tuple(items))  # x < 1 or x > 5
    return items[0] if len(items) == 1 else Value("list", None, tuple(items))


def choose_signs(text: str, but: tuple[str, ...] = ()) -> list[str]:
    r"""The texts that one with \pm stands for; \mp has the opposite sign of \pm. A text that opens
    with one of `but`, a set, stays as it is: its items are chosen one by one."""
    if text.startswith(but) and enclosed(text):
        return [text]
    pieces = re.split(r"\\(pm|mp)(?![a-zA-Z])", text)  # text, sign, text, ...
    count, paired = len(pieces) // 2, "mp" in pieces
    if count > 4:
        raise Unreadable
    signs = {"pm": "+-", "mp": "-+"}
    texts = (
        "".join(
            piece if i % 2 == 0 else signs[piece][choice[0 if paired else i // 2]]
            for i, piece in enumerate(pieces)
        )
        for choice in product((0, 1), repeat=1 if paired else count)
    )
    return list(dict.fromkeys(texts))


def read_item(text: str) -> Value:
    try:
        return read_structure(text)._replace(text=spell(text))
    except Unreadable:
        return Value("spelling", spell(text), text=spell(text))


def spell(text: str) -> str:
    return re.sub(r'(?<!\d)\s|\s(?!\d)|"', "", text)


def read_structure(text: str) -> Value:
    """Reads a single item, without commas outside brackets. Raises Unreadable."""
    parts, found = split(text, RELATIONS)
    if found:
        if "" in parts:
            raise Unreadable
        return Value("relation", tuple(map(RELATIONS.get, found)), tuple(map(read_item, parts)))
    parts, found = split(text, (r"\cup", r"\cap", r"\setminus"))
    if found:
        if len(set(found)) > 1:
            raise Unreadable
        return Value("sets", found[0], tuple(map(read_structure, parts)))
    if text in (r"\emptyset", r"\{\}", r"\{ \}"):
        return Value("set")
    if text in (r"\mathbb{R}", r"\mathbb R"):
        return read_structure(r"(-\infty,\infty)")
    if choice := re.fullmatch(r"\(([A-F])\) ([^(^_].*)", text):
        return Value("choice", choice[1], (read_structure(choice[1]), read_structure(choice[2])))
    parts, _ = split(text, (":",))
    if len(parts) > 1:
        parts[-1], unit = strip_unit(parts[-1])
        return Value("ratio", None, tuple(map(read_structure, parts)), unit)
    if match := MATRIX.fullmatch(text):
        return read_matrix(*match.groups())
    if base := BASE.fullmatch(text):
        number = int(base[2]) if base[2] else COUNTS.index(base[3])
        return Value("base", (base[1].lower(), number))
    if enclosed(text):
        width = 2 if text[0] == "\\" else 1
        inside = text[width:-width].strip()
        if width == 2 and (condition := CONDITION.fullmatch(inside)):
            return read(condition[1].strip())
        parts, _ = split(inside, (",", ";"))
        brackets = text[:width] + text[-width:]
        if brackets == r"\{\}" or (brackets == "{}" and len(parts) > 1):
            signed = [each for part in parts for each in choose_signs(part)]
            return Value("set", None, tuple(map(read_structure, signed)))
        if len(parts) > 1 and brackets in ("()", "(]", "[)", "[]"):
            return Value("group", brackets, tuple(map(read_structure, parts)))
        if brackets in ("()", "[]", "{}"):
            return read_structure(inside)
        raise Unreadable
    if words := re.fullmatch(r'"([^"]*)"', text):
        if words[1] in COUNTS:
            return Value("expression", sympy.Integer(COUNTS.index(words[1])))
        return Value("words", words[1])
    if re.fullmatch(r"[fgh]\s*\(\s*(?:[A-Za-z]|-?\d+)\s*\)", text):  # a value: f(0) < f(x) < 1
        return Value("expression", sympy.Symbol(spell(text), real=True))
    text, unit = strip_unit(text)
    magnitude, _, rest = unit.partition(" ")
    if magnitude in MAGNITUDES:
        return Value("expression", read_leaf(text) * 10 ** MAGNITUDES[magnitude], unit=rest)
    return Value("expression", read_leaf(text), unit=unit)


def enclosed(text: str) -> bool:
    """Whether the text is in brackets: the first one closes with the last character."""
    depth = 0
    for match in TOKEN.finditer(text):
        depth += bool(OPEN.match(match[0])) - bool(CLOSE.match(match[0]))
        if depth == 0:
            return match.end() == len(text) > 1 and bool(OPEN.match(text))
    return False


def strip_unit(text: str) -> tuple[str, str]:
    """The text before the words (degree signs, per cents) at its end, and those words, each unit
    in one spelling."""
    match = UNIT.fullmatch(text)
    if not match or (r"\degree" in match[2] and re.search("|".join(FUNCTIONS), match[1])):
        return text, ""
    unit = match[2].replace("\\", " ").replace("/", " per ")
    for power, word in ("2", " square "), ("3", " cubic "):
        unit = re.sub(rf"\^\s*\{{?{power}\}}?", word, unit)
    words = [UNITS.get(w) or UNITS.get(w.rstrip("s"), w) for w in re.findall(r"[^\s\".]+", unit)]
    return match[1], " ".join(sorted(words, key=lambda word: (word not in MAGNITUDES, word)))


def read_matrix(factor: str, kind: str, body: str) -> Value:
    if factor in ("(", "[") or body.count("&") > 100:
        raise Unreadable
    rows = [split(row, ("&",))[0] for row in split(body, (r"\cr",))[0] if row]
    if len({len(row) for row in rows}) != 1:
        raise Unreadable
    cells = [f"({factor})*({cell})" if factor else cell for row in rows for cell in row]
    kind = "determinant" if kind == "vmatrix" else "matrix"
    return Value("matrix", (kind, len(rows)), tuple(map(read_structure, cells)))


# ---- leaves --------------------------------------------------------------------------------------

CONSTANTS = {"e": sympy.E, "i": sympy.I, r"\pi": sympy.pi, r"\infty": sympy.oo}
CONSTANTS[r"\degree"] = sympy.pi / 180
LEAF = re.compile(
    rf"""\s*(?:(?P<number>\d+(?:\.\d*)?|\.\d+)
    |(?P<name>[A-Za-z](?:_(?:\w|\{{\w+\}}))?|\\(?:{GREEK}|pi|infty|degree)(?![a-zA-Z]))
    |(?P<takes>\\(?:frac|binom|sqrt)(?![a-zA-Z])|\^|(?<=log)\s*_)
    |(?P<open>[(\[{{])|(?P<close>[)\]}}])
    |(?P<other>[-+*/!|]|\\(?:{"|".join(FUNCTIONS)}|cdot|times|div|[lr]floor|[lr]ceil)(?![a-zA-Z])))
    """,
    re.VERBOSE | re.ASCII,
)


def read_leaf(text: str):
    """A sympy expression. Raises Unreadable, also if any of `text` is left over.

    The grammar sees placeholders for numbers and names, and braces around every argument.
    """
    table: list = []  # what the placeholders stand for
    output: list[str] = []
    stack: list[tuple[str, str, int]] = []  # of brackets: as written, as closed, arguments to come
    position, wanted, before = 0, 0, ""
    text = text.strip()
    if re.search(r"\^\s*(?:\w+|\{[^{}]*\})\s*\^|(?<![\d.])0[xXbBoO]", text):
        raise Unreadable  # a^b^c, which the grammar reads as (a^b)^c; 0x10
    while position < len(text):
        match = LEAF.match(text, position)
        if not match or len(output) > MAX_TOKENS or len(stack) > MAX_DEPTH:
            raise Unreadable
        kind, position = match.lastgroup, match.end()
        token = match[kind].strip()
        if kind in ("number", "name"):
            if kind == "number" and token.isdigit() and output[-1:] in (["_"], [r"\frac"]):
                position -= len(token) - 1  # \frac1{72}, \log_28
                token = token[0]
            if kind == before == "number" or len(token) > MAX_DIGITS:
                raise Unreadable
            holder = rf"\variable{{v{len(table)}}}"
            table.append(
                sympy.Rational(token)
                if kind == "number"
                else CONSTANTS.get(token) or sympy.Symbol(re.sub("[{}]", "", token), real=True)
            )
            output.append(f"{{{holder}}}" if wanted else holder)
            before = "" if wanted else kind
            wanted = max(wanted - 1, 0)
            continue
        if kind == "takes":
            if wanted:
                raise Unreadable
            output.append(token)
            wanted = 2 if token in (r"\frac", r"\binom") else 1
        elif kind == "open":
            if token == "[" and output[-1:] == [r"\sqrt"]:
                stack.append(("[", "]", wanted))
            elif wanted:
                stack.append((token, "}" if token == "{" else ")}", wanted - 1))
            else:
                stack.append((token, ")", 0))
            output.append({"]": "[", "}": "{", ")}": "{(", ")": "("}[stack[-1][1]])
            wanted = 0
        elif kind == "close":
            if wanted or not stack or stack[-1][0] + token not in ("()", "[]", "{}"):
                raise Unreadable
            _, closing, wanted = stack.pop()
            output.append(closing)
        elif wanted:
            raise Unreadable
        else:
            output.append(token + " ")
        before = kind
    if stack or wanted or not table:
        raise Unreadable
    if output == [r"\variable{v0}"]:
        return table[0]
    try:
        tree = latex2sympy(
            "".join(output),
            normalization_config=None,
            conversion_config=ConversionConfig(lowercase_symbols=False),
        )
    except MemoryError:
        raise
    except Exception:  # the grammar's errors say no more
        raise Unreadable from None
    return evaluate(tree, table)


def evaluate(tree, table: list):
    """A tree of placeholders v0, v1, ... with `table`'s values, computed from its leaves. Raises
    Unreadable if a number on the way would have more than MAX_BITS bits, or is not a number."""
    if not isinstance(tree, sympy.Expr):
        raise Unreadable
    if tree.is_Symbol:
        return table[int(tree.name[1:])]
    arguments = [evaluate(argument, table) for argument in tree.args]
    if tree.func in (sympy.factorial, sympy.binomial):
        for argument in arguments:
            if argument.is_number and not (argument.is_Integer and argument <= MAX_FACTORIAL):
                raise Unreadable
    if tree.is_Pow or tree.func is sympy.exp:
        base, power = arguments if tree.is_Pow else (sympy.E, arguments[0])
        if power.is_number and power.is_finite:
            scale = abs(sympy.log(abs(base)).evalf(15)) if base.is_number and base != 0 else 20
            bits = abs(power.evalf(15)) * scale  # infinity to the power of 0 has none
            if not bits.is_finite or not bool(bits < MAX_BITS):
                raise Unreadable
            if base.is_negative and power.is_Rational and power.q > 1 and power.q % 2:
                return (-1) ** power.p * (-base) ** power  # the real root
    value = tree.func(*arguments) if arguments else tree
    if value.has(sympy.nan, sympy.zoo):
        raise Unreadable
    if value.is_Rational and max(abs(value.p), value.q).bit_length() > MAX_BITS:
        raise Unreadable
    return value
