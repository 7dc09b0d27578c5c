"""Are two MATH answers exactly the same? No tolerance, and 5 is not 5 % or 500.

`python -m mathequal.equivalence` answers lines of JSON [answer, reference] with true or false.
process.py starts it as a process of its own, so that a model's text can neither hang the training
process nor fill its memory. tests/test_mathequal.py holds the conventions.
"""

import json
import os
import re
import resource
import sys
import threading
import time
from functools import lru_cache
from itertools import pairwise, product

import sympy

from mathequal.answers import GREEK, UNITS, Unreadable, Value, clean, read, spell, split

MEMORY_LIMIT = 1 << 30  # bytes of address space
POINTS = ("0.7310585", "1.9134172", "-0.6180339", "2.2360679", "-1.4142135")
DIGITS, TINY = 50, sympy.Float("1e-25")  # values at the points only say what cannot be equal
NAME = r"[A-Za-z](?:_\w|_\{[\w+-]+\})?"
OVER = r"\\(?:angle|triangle|overline|overrightarrow|vec|bar|hat|widehat|det)"
LABEL = re.compile(  # x, x_1, f(x), f^{-1}(2), f(g(2)), A^{-1}, (x,y), AB, |AB|, \angle ABC, "area"
    rf'(?:"[^"]*"|{OVER}|\\(?:{GREEK})|{NAME}|[{{}}\' :])*(?:\([A-Za-z0-9, ]*\))?'
    r"|[fgh](?:\^\{-1\})?\((?:-?\w+|[fgh]\(-?\w+\))\)|[A-Z]\^\{-1\}"
    r"|\|[A-Z]{2}\||\\\|(?:\w|\\vec\{\w\})\\\||\[[A-Z]{3,}\]"
)


def equal(answer: str, reference: str) -> bool:
    """Whether both say the same; an answer that cannot be read equals only its own spelling."""
    answer, reference = clean(answer), clean(reference)
    if not answer or not reference:
        return False
    spellings = spell(answer), spell(reference)
    if '"' in answer + reference:
        spellings = spellings[0].lower(), spellings[1].lower()
    if spellings[0] == spellings[1]:
        return True
    # "1,234" is a number, unless the reference shows ("100, 234") that commas part a list.
    thousands = not re.search(r"\d, \d{3}(?!\d)", reference)
    try:
        sides = product(choose_sides(answer, thousands), choose_sides(reference, thousands))
        return any(same(one, other) for one, other in sides)
    except Unreadable:
        return False


def choose_sides(text: str, thousands: bool) -> list[Value]:
    r"""The sides that count as the answer: 2/3 and 0.67 of 2/3 \approx 0.67; 11 of x \approx 11;
    both of 0.56 = 56\%. Raises Unreadable for numbers that are not close, so two answers."""
    parts, _ = split(text, (r"\approx",))
    *others, last = [read(part, thousands) for part in parts]
    if not others and last.kind == "relation" and last.data == ("=",):
        left, right = last.parts
        if right.unit == "percent" and left.kind == "expression" and 100 * left.data == right.data:
            return [last, left, right]
    others = [value for value in others if not LABEL.fullmatch(value.text)]
    for value in others:
        number, wanted = real_number(split_label(value)[1]), real_number(last)
        if not bool(abs(number - wanted) <= abs(wanted) / 20):
            raise Unreadable
    return [*others, last]


def same(a: Value, b: Value) -> bool:
    if a == b:
        return True
    kinds = {a.kind, b.kind}
    if kinds & {"relation", "sets"} and same_sets(a, b):
        return True
    if kinds == {"relation"} and same_relations(a, b):
        return True
    if "relation" in kinds:
        (label_a, a), (label_b, b) = split_label(a), split_label(b)
        if "relation" in (a.kind, b.kind) or len({label_a, label_b} - {""}) == 2:
            return False
        return same(a, b)
    if kinds & {"list", "set"}:
        items, others = (v.parts if v.kind in ("list", "set") else (v,) for v in (a, b))
        if "set" in kinds:
            items, others = distinct(items), distinct(others)
        return same_in_any_order(items, others)
    known = set(f"{a.unit} {b.unit}".split()) <= set(UNITS.values())
    if a.unit != b.unit and ({"am", "pm"} & {a.unit, b.unit} or (a.unit and b.unit and known)):
        return False  # a unit may be left out, except in a time
    if len(kinds) == 2 and "choice" in kinds:  # (C) 12 is C and is 12
        choice, other = (a, b) if a.kind == "choice" else (b, a)
        return any(same(part, other) for part in choice.parts)
    if kinds == {"base", "expression"}:  # the question says which base
        base, other = (a, b) if a.kind == "base" else (b, a)
        return base.data[0] == spell(other.text).lower()
    if a.kind != b.kind:
        return False
    if a.kind == "expression":
        return same_expressions(a.data, b.data)
    if a.kind == "base":
        return a.data == b.data or None is not base_value(*a.data) == base_value(*b.data)
    if a.kind == "sets":
        return a.data == b.data != r"\setminus" and same_in_any_order(a.parts, b.parts)
    return a.data == b.data and len(a.parts) == len(b.parts) and all(map(same, a.parts, b.parts))


def same_in_any_order(items: tuple, others: tuple) -> bool:
    left = list(others)
    for item in items:
        match = next((i for i, other in enumerate(left) if same(item, other)), None)
        if match is None:
            return False
        del left[match]
    return not left


def distinct(items: tuple) -> tuple:
    kept: list[Value] = []
    for item in items:
        if not any(same(item, other) for other in kept):
            kept.append(item)
    return tuple(kept)


def base_value(digits: str, base: int) -> int | None:
    try:
        return int(digits, base) if base else None
    except ValueError:
        return None


# ---- relations and sets --------------------------------------------------------------------------


def split_label(value: Value) -> tuple[str, Value]:
    r"""("x", 5) for x = 5, 5 = x, x = 2 + 3 = 5 and x \in 5; ("", 5) for 5 and for 10/2 = 5."""
    if value.kind != "relation" or set(value.data) - {"=", "in"}:
        return "", value
    first, *others = value.parts
    if value.data == ("=",) and is_label(others[0]) and not is_label(first):
        return others[0].text, first
    label = first.text if is_label(first) else ""
    if all(same(part, others[-1]) for part in (others if label else value.parts)):
        return label, others[-1]
    return "", value


def is_label(value: Value) -> bool:
    """Whether it is a name, or a point or vector of names."""
    if value.kind in ("group", "matrix"):
        return all(part.kind == "expression" and part.data.is_Symbol for part in value.parts)
    return bool(LABEL.fullmatch(value.text))


def same_relations(a: Value, b: Value) -> bool:
    """Whether signs are the same and differences of sides are, up to a factor: 2x < 6 and 3 > x."""

    def differences(value: Value) -> list:
        found = []
        for sign, (left, right) in zip(value.data, pairwise(value.parts), strict=True):
            if sign == "in" or not left.kind == right.kind == "expression":
                return []
            if sign[0] == ">":
                sign, left, right = sign.replace(">", "<"), right, left
            found.append((sign, left.data - right.data))
            if not found[-1][1].free_symbols:  # 1 = 2 says nothing, so it is not 3 = 5
                return []
        return found

    def proportional(one: tuple, other: tuple) -> bool:
        if one[0] != other[0] or one[1].free_symbols != other[1].free_symbols or other[1] == 0:
            return False
        ratio = one[1] / other[1]
        values = [value for i in range(3) if (value := probe(ratio, i)) is not None]
        if not values or any(abs(value - values[0]) > TINY * abs(value) for value in values):
            return False
        ratio = sympy.simplify(ratio)
        return bool(ratio.is_number and ratio and (one[0] in ("=", "!=") or ratio.is_positive))

    one, other = differences(a), differences(b)
    return 0 < len(one) == len(other) and all(
        any(proportional(x, y) for y in ys) for xs, ys in ((one, other), (other, one)) for x in xs
    )


def same_sets(a: Value, b: Value) -> bool:
    """Whether two sets of reals (intervals, unions, inequalities in one variable) are the same."""
    try:
        (name_a, set_a), (name_b, set_b) = real_set(a), real_set(b)
        if "" not in (name_a, name_b) and name_a != name_b:
            return False
        return bool(set_a == set_b or set_a.symmetric_difference(set_b).is_empty)
    except (Unreadable, TypeError, ValueError, NotImplementedError):
        return False


def real_set(value: Value) -> tuple:
    """(variable or "", sympy set). Raises Unreadable if it is not a set of real numbers."""
    if value.kind == "group" and len(value.parts) == 2:
        low, high = map(real_number, value.parts)
        return "", sympy.Interval(low, high, value.data[0] == "(", value.data[1] == ")")
    if value.kind == "set":
        return "", sympy.FiniteSet(*map(real_number, value.parts))
    if value.kind == "sets":
        names, sets = zip(*map(real_set, value.parts), strict=True)
        if len(set(names)) > 1:
            raise Unreadable
        join = {r"\cup": sympy.Union, r"\cap": sympy.Intersection, r"\setminus": sympy.Complement}
        return names[0], join[value.data](*sets)
    if value.kind != "relation" or "=" in value.data:
        raise Unreadable
    names, result = set(), sympy.S.Reals
    for sign, (left, right) in zip(value.data, pairwise(value.parts), strict=True):
        if sign == "in":
            piece = real_set(right)[1]
        else:
            if right.kind == "expression" and right.data.is_Symbol:
                left, right = right, left
                sign = sign.translate(str.maketrans("<>", "><"))
            bound = real_number(right)
            piece = sympy.FiniteSet(bound).complement(sympy.S.Reals)
            if sign[0] == "<":
                piece = sympy.Interval(-sympy.oo, bound, True, sign == "<")
            elif sign[0] == ">":
                piece = sympy.Interval(bound, sympy.oo, sign == ">", True)
        if left.kind != "expression" or not left.data.is_Symbol:
            raise Unreadable
        names.add(left.data.name)
        result = result.intersect(piece)
    if len(names) > 1:
        raise Unreadable
    return names.pop(), result


def real_number(value: Value):
    if value.kind != "expression" or not (value.data.is_number and value.data.is_extended_real):
        raise Unreadable
    return value.data


# ---- expressions ---------------------------------------------------------------------------------


def same_expressions(a, b) -> bool:
    """Values at a few points can show that expressions differ; only a proof makes them equal."""
    if a == b:
        return True
    if (a.is_Rational and b.is_Rational) or a.is_infinite or b.is_infinite:
        return False
    symbols = frozenset(a.free_symbols | b.free_symbols)
    for i in range(3 if symbols else 1):
        one, other = probe(a, i, symbols), probe(b, i, symbols)
        if None in (one, other) or (symbols and not (one.is_real and other.is_real)):
            continue  # the root of a negative number: the problem does not mean this point
        if abs(one - other) > TINY * max(abs(one), abs(other)):
            return False
    difference = sympy.expand(a - b)
    if difference != 0:
        difference = sympy.simplify(difference)
    if difference != 0 and symbols:  # sqrt(1/n) = 1/sqrt(n) if n is above 0
        positive = {symbol: sympy.Symbol(symbol.name, positive=True) for symbol in symbols}
        difference = sympy.simplify(difference.xreplace(positive))
    return difference == 0 or bool(difference.is_number and difference.equals(0))


@lru_cache(10_000)
def probe(expression, point: int, symbols: frozenset | None = None):
    """The value at one of POINTS, None if it has none there."""
    names = sorted(expression.free_symbols if symbols is None else symbols, key=str)
    at = {
        symbol: sympy.Float(POINTS[(point + i) % len(POINTS)], DIGITS) + i // len(POINTS)
        for i, symbol in enumerate(names)
    }
    value = expression.xreplace(at).evalf(DIGITS)
    return value if value.is_number and value.is_finite else None


# ---- the worker ----------------------------------------------------------------------------------


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT, MEMORY_LIMIT))
    parent = os.getppid()

    def watch() -> None:  # stdin stays open while a fork of the parent holds the pipe
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(0)

    threading.Thread(target=watch, daemon=True).start()
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # libraries' prints must not be replies
    replies.write("ready\n")
    for line in sys.stdin:
        replies.write(json.dumps(equal(*json.loads(line))) + "\n")


if __name__ == "__main__":
    main()
