"""Rewards of GSM8K-form answers."""

import json
import os
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from common import data
from common.grading import extract_number, grade, grade_all

CASES = os.path.join(os.path.dirname(__file__), "../../shared/cases/grader_cases.jsonl")


@pytest.mark.parametrize(
    ("response", "answer", "right"),
    [
        ("so\n#### 72", "72", True),
        ("#### 71\nno: #### 72", "72", True),  # the last marker counts
        ("#### 72\nno: #### 71", "72", False),
        ("72", "72", False),  # no marker
        ("#### ", "72", False),
        ("####", "", False),  # an empty answer never pays
        ("#### 1,234", "1234", True),
        ("#### 1234", "1,234", True),  # commas on both sides
        ("#### $18.00", "18", True),
        ("#### -$5", "-5", True),
        ("#### $-5", "-5", True),
        ("#### \u22125", "-5", True),
        ("#### 5", "-5", False),
        ("#### 18 dollars, not 20", "18", True),
        ("#### .5", "0.50", True),
        ("#### 007", "7", True),
        ("#### -0.0", "0", True),
        ("#### 18.01", "18", False),
        ("#### 50", "0.5", False),  # no factor of a hundred
        ("#### 9**9", "9", False),  # an expression is not its first number
        ("#### 1e9", "1", False),
        ("#### 3/4", "3", False),
        ("#### \u0663", "3", False),  # other scripts' digits are not read as ours
        ("#### " + "1" * 1_000_000, "1", False),
        ("#### " + "\n" * 100_000 + "5", "5", True),
        ("#### - $ 5", "-5", True),
        ("#### " * 200_000 + "5", "5", True),
        ("#### __import__('os').system('touch GRADER_PWNED')", "0", False),
    ],
)
def test_grade(response, answer, right):
    start = time.perf_counter()
    assert grade(response, answer) == float(right)
    assert time.perf_counter() - start < 1  # linear: a megabyte is nothing
    assert not os.path.exists("GRADER_PWNED")


def test_extract_number():
    assert extract_number("in all $1,234.50 or so") == "1234.5"
    assert extract_number("none") is None


def test_a_response_that_was_cut_off_gets_nothing():
    tokenizer = data.make_chain_tokenizer()
    ids = tokenizer("#### 5")["input_ids"]
    rewards = grade_all(tokenizer, [[*ids, 1], ids, [1]], [True, False, True], ["5", "5", "5"])
    assert rewards == [1.0, 0.0, 0.0]


@pytest.mark.skipif(not os.path.exists(CASES), reason="no grader cases beside the clone")
def test_gsm8k_cases_also_in_threads():
    with open(CASES, encoding="utf-8") as file:
        cases = [case for case in map(json.loads, file) if case["dataset"] == "gsm8k"]
    responses = [
        "".join(text * times for text, times in case["response_parts"])
        if case["response"] is None
        else case["response"]
        for case in cases
    ]
    answers = [case["ground_truth"] for case in cases]
    rewards = [grade(*pair) for pair in zip(responses, answers, strict=True)]
    wrong = [c["id"] for c, r in zip(cases, rewards, strict=True) if r != float(c["expected"])]
    assert len(cases) > 30 and not wrong
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(grade, responses, answers)) == rewards
