"""Response and answer -> reward. Nothing that a model writes is ever evaluated.

python -m common.grading FILE.jsonl     grades a file of responses, as mathequal/__main__.py says
"""

import re
from collections.abc import Callable
from typing import Annotated, NamedTuple

import tyro

from common import ranks, require
from mathequal import grade_boxed
from mathequal.__main__ import grade_file

# A sign before or after the currency, commas between digits, digits on at least one side of the
# dot. ASCII digits only; U+2212 is the minus that word processors write. Spaces are bounded: two
# unbounded runs side by side would take cubic time on a page of newlines.
NUMBER = re.compile(
    r"(?:(?P<sign>[-+\u2212])\s{0,3})?(?:[$€£]\s{0,3})?(?P<sign2>[-+\u2212])?"
    r"(?P<digits>\d[\d,]*\.?\d*|\.\d+)",
    re.ASCII,
)
# Behind a number it makes an expression ("9**9", "1e9", "3/4") whose value is not that number.
OPERATOR = re.compile(r"\s*(\*\*|[*/^])\s*\d|[eE][-+]?\d", re.ASCII)


def extract_number(text: str) -> str | None:
    """The first number of `text` in one spelling ("$1,234.50 in all" -> "1234.5"), None where there
    is none or where it begins an expression."""
    match = NUMBER.search(text)
    if match is None or OPERATOR.match(text, match.end()):
        return None
    whole, _, fraction = match["digits"].replace(",", "").partition(".")
    number = (whole.lstrip("0") or "0") + ("." + fraction.rstrip("0")).rstrip(".")
    negative = (match["sign"] or match["sign2"]) in ("-", "\u2212") and number != "0"
    return "-" + number if negative else number


# ---- the reward: your own goes here (docs/fork.md) -----------------------------------------------


def is_gradable(answer: str) -> bool:
    """Whether a response could be right; data.py refuses a file with an answer that is not."""
    return extract_number(answer) is not None


def grade(response: str, answer: str) -> float:
    """1.0 iff the first number after the response's last "####" equals the answer, else 0.0.

    Numbers are compared as exact decimal strings: no tolerance, no factor of a hundred. A response
    without the marker, or an answer without a number, never pays.
    """
    _, marker, tail = response.rpartition("####")
    predicted, expected = extract_number(tail) if marker else None, extract_number(answer)
    return float(predicted is not None and predicted == expected)


class Rule(NamedTuple):
    is_gradable: Callable[[str], bool]
    grade: Callable[[str, str], float]


RULES = {
    "####": Rule(is_gradable, grade),
    "boxed": Rule(lambda answer: bool(answer.strip()), grade_boxed),  # MATH
}


def check_answer(rule: str, answer: str, where: str) -> None:
    require(
        RULES[rule].is_gradable(answer),
        f"{where}: the answer {answer!r:.60} is no number, so no response could be right",
    )


def grade_all(tokenizer, samples: list, answers: list[str], rule: str) -> list[float]:
    """Rewards of sampling.Samples; one that was cut off at the limit gets 0 whatever it says. Every
    rank must call it with all of them: each grades its share. `rule`: a key of RULES."""
    mine = ranks.share(samples)
    ids = [list(sample.ids) for sample in mine]  # dpo_pos.py keeps arrays
    texts = tokenizer.batch_decode(ids, skip_special_tokens=True) if mine else []
    return ranks.gather(
        [
            RULES[rule].grade(text, answer) if sample.finished else 0.0
            for text, sample, answer in zip(texts, mine, ranks.share(answers), strict=True)
        ]
    )


def main(path: Annotated[str, tyro.conf.Positional]) -> None:
    grade_file(path, {"gsm8k": grade, "math": grade_boxed})


if __name__ == "__main__":
    tyro.cli(main)
