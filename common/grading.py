"""Response and answer -> reward. What a model writes is never run as code.

python -m common.grading FILE.jsonl     grades a file of responses, as mathequal/__main__.py says
"""

from collections.abc import Callable
from typing import Annotated, NamedTuple

import tyro

from common import ranks
from mathequal import grade_boxed
from mathequal.__main__ import grade_file
from mathequal.numbers import extract_number, is_number

# ---- the reward: your own goes here (docs/fork.md) -----------------------------------------------


def is_gradable(answer: str) -> bool:
    """Whether a response could be right; a file with an answer that is not is refused."""
    return is_number(answer)


def grade(response: str, answer: str) -> float:
    """1.0 iff the first number after the response's last "####" equals the answer, else 0.0.

    Numbers are compared as exact decimal strings: no tolerance, no factor of a hundred. A response
    without the marker, or an answer without a number, never pays.
    """
    _, marker, tail = response.rpartition("####")
    predicted, expected = extract_number(tail) if marker else None, extract_number(answer)
    return float(predicted is not None and predicted == expected)


class Rule(NamedTuple):
    is_gradable: Callable[[str], bool]  # takes an answer: could a response match it?
    grade: Callable[[str, str], float]


RULES = {
    "####": Rule(is_gradable, grade),
    "boxed": Rule(lambda answer: bool(answer.strip()), grade_boxed),  # MATH
}


def grade_all(tokenizer, samples: list, answers: list[str], rule: str) -> list[float]:
    """Rewards of sampling.Samples; one that was cut off at the limit gets 0 whatever it says. Every
    rank must call it with all samples: each grades its share. `rule`: a key of RULES."""
    mine = ranks.share(samples)
    ids = [sample.ids for sample in mine]
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
