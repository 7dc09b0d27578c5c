"""Plain numbers, as in GSM8K's answers: "$1,234.50" is 1234.5; "2 2/3", "10-15", "5!" are not."""

import re

# Between groups of three digits: a comma, LaTeX's "{,}" or thin space, a space, an apostrophe, "_".
GAP = r"(?:\{,\}|,? ?\\[,!:; ] ?|[, \u00a0\u2009\u202f'_])"
# A sign before or after the currency; digits on at least one side of the dot, except after a letter
# (Rs.500), where the dot is not part of the number. ASCII digits only. U+2212 is the minus of word
# processors; U+2013, a dash, is one too where no space follows. Runs of spaces are bounded: two
# unbounded ones side by side would take cubic time on a page of newlines.
NUMBER = re.compile(
    r"(?:(?P<sign>[-+\u2212]|\u2013(?!\s))\s{0,3})?"
    r"(?:(?:US|[AC])?\\?[$€£¥₹₩]\s{0,3})?(?P<sign2>[-+\u2212\u2013])?"
    rf"(?P<digits>\d{{1,3}}(?:{GAP}\d{{3}})+(?!\d)(?:\.\d+)?|\d{{1,2}}(?:,\d\d)+,\d{{3}}(?!\d)"
    r"|\d+\.?\d*|(?<![A-Za-z])\.\d+)",
    re.ASCII,
)
SCALES = "hundred|thousand|million|billion|trillion|dozen|lakh|crore|bn\\b|mn\\b|mil\\b|k\\b"
# Text after a number, on its line, that makes the number a part of something else.
SPACES = r"[^\S\n]{0,3}"
OPERATOR = r"(?:\*\*|[-+*/^:\u00b1\u00b7\u00d7\u00f7\u2012-\u2015\u2212]"
OPERATOR += r"|\\(?:times|cdot|div|over|pm)(?![a-z]))"
BEHIND = (
    r"[eE][-+]?\d",  # 1e9
    r",\d|\.\d",  # 5,5 and 1.2.3
    r"!|[\u00b2\u00b3\u00b9\u2070-\u2079]",  # 5! and 5²
    rf"{SPACES}{OPERATOR}{SPACES}[-+({{\\$€£]{{0,3}}{SPACES}\d",  # 3/4, 1:3, 10-15
    r"[ \t\u00a0]{1,3}\d",  # 2 2/3
    rf"{SPACES}[\u00bc-\u00be\u2150-\u215e]",  # 2½
    rf"{SPACES}\\(?:[dt]?frac|sqrt|pi|binom|choose)(?![a-z])",  # 2\frac{2}{3}
    r"[^\S\n]{1,3}(?:to|or|and|through)[^\S\n]{1,3}[$€£]?[-+]?\d",  # 10 to 15
    r"[^\S\n]{1,3}and an? (?:half|third|quarter)",  # 5 and a half
    rf"(?:-|[^\S\n]){{0,3}}(?:\\(?:text|mathrm|,)\s?\{{?{SPACES})?(?:(?i:{SCALES})|[MB]\b)",  # 5M
)
BEHIND = re.compile("|".join(BEHIND), re.ASCII)
# Text before a number that does the same: a power, an index, a denominator, an argument
# (\frac{3}{4}), a sign in words.
BEFORE = re.compile(
    r"(?:(?:\^|[\w)\]}]\s{0,3}[_/*\u00d7\u00f7])\s{0,3}\{?\s{0,3}"
    r"|(?i:minus|negative)\s{1,3}"
    r"|\\(?!boxed|text|math|fbox|bf)[a-zA-Z]+\s{0,3}(?:\[[^]]{0,9}\]\s{0,3})?\{\s{0,3})$",
    re.ASCII,
)


def extract_number(text: str) -> str | None:
    """The first number of `text` in one spelling ("$1,234.50 in all" -> "1234.5"). None if there is
    none, or if it is a part of something else: an expression, a range, "5 million"."""
    match = NUMBER.search(text)
    if match is None or BEHIND.match(text, match.end()):
        return None
    before = text[max(0, match.start() - 40) : match.start()]
    is_difference = match["sign"] and re.search(r"[\w)\]}]$", before)  # x-5
    if BEFORE.search(before) or is_difference:
        return None
    whole, _, fraction = match["digits"].partition(".")
    whole = re.sub(r"\D", "", whole)
    number = (whole.lstrip("0") or "0") + ("." + fraction.rstrip("0")).rstrip(".")
    negative = (match["sign"] or match["sign2"]) in ("-", "\u2212", "\u2013") and number != "0"
    return "-" + number if negative else number


def is_number(text: str) -> bool:
    """Whether `text` is one number, perhaps with a currency or a unit, and no other digits."""
    match = NUMBER.search(text)
    rest = text[: match.start()] + text[match.end() :] if match else ""
    return extract_number(text) is not None and not re.search(r"\d", rest)
