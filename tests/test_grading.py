"""Rewards: the number after the marker, or the last box, of responses as token ids and in files."""

import json
import os
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

import mathequal
import mathequal.process
from common import ranks
from common.grading import grade, grade_all
from common.sampling import Sample
from mathequal import grade_boxed
from mathequal.numbers import extract_number, is_number
from tasks import chain
from tests.conftest import call

SHARED = os.path.join(os.path.dirname(__file__), "../../shared")
CASES = os.path.join(SHARED, "cases/grader_cases.jsonl")


@pytest.fixture(scope="module", autouse=True)
def a_busy_machine_decides_nothing():
    ranks.set_up()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mathequal.process, "TIME_LIMIT", 600)
        yield


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
    start = time.thread_time()
    assert grade(response, answer) == float(right)
    assert time.thread_time() - start < 30  # linear: some hundredths, however busy the machine is
    assert not os.path.exists("GRADER_PWNED")


NUMBERS = {
    "1": ["1", "01.0", "+1", "€1.000", "= 1"],
    "5": ["5 kg", "5kg", "5 kilos", r"5\%", "5 %", r"5^\circ", r"\$5", "5-year-old", "5 = 2+3"],
    "72": ["72.", "72, so", "**72**", r"\boxed{72}", r"\text{72}", "72 dollars, not 20", "72\n3"],
    "8": ["8\n-2", "8\n/ 2", "8\nmillion"],  # a line ends what is said
    "60": ["60/hour", "60 miles/hour", "and/or 60"],
    "-5": ["-5", "= -5", "total: -5", "- $ 5", "$-5"],
    "1000": ["1,000", "1 000", "1\u202f000", "1_000", "1'000", r"1\,000", "1{,}000", "1,000.0"],
    "100000": ["1,00,000", "100,000", "100 000"],
    "11111111100": [r"11,\! 111,\! 111,\! 100"],
    "500": ["Rs.500", "No.500", "US$500", "¥500", "₹500"],
    "-500": ["-₹500", "-¥500", "-US$500", "\u2013500"],
    "0.5": [".5", "$.5", "= .50"],
    "1234.5": ["in all $1,234.50 or so", "1234.5"],
}
WITH_OTHERS = (
    "72 dollars, not 20",
    "72\n3",
    "5 = 2+3",
    "8\n-2",
    "8\n/ 2",
)  # as an answer they say two things
NO_NUMBERS = [
    *["none", "", "2 2/3", r"\frac{3}{4}", r"2\frac{2}{3}", r"{3 \over 4}", "3/4", "2½", "2 ½"],
    *[
        "5!",
        "5²",
        "x^2",
        "5^{2}",
        "x_2",
        r"\sqrt{9}",
        "9**9",
        "5 \u00d7 3",
        r"5 \times 3",
        "5*3",
        "1e9",
    ],
    *["5 million", "5-million", r"5\text{ million}", "5k", "5 K", "5 hundredths", "5 dozen"],
    *["10-15", "10 - 15", "10\u201315", "10 to 15", "3 or 4", "3 and 4", "5 and a half", "5+3=8"],
    *["1:3", "12:30", "5,5", "1,23", "1 0000", "1.2.3", "x-5", r"5\pm 1", "2 3"],
    *["5M", "5 mil", "$5M", "5B", "minus 5", "Negative 5"],
]


@pytest.mark.parametrize(
    ("text", "number"),
    [(text, number) for number, texts in NUMBERS.items() for text in texts]
    + [(text, None) for text in NO_NUMBERS],
)
def test_extract_number(text, number):
    """A number that opens, or closes, something else is not its value."""
    assert extract_number(text) == number
    assert is_number(text) == (number is not None and text not in WITH_OTHERS)


@pytest.mark.parametrize(
    "text", ["1", " ", "\n", "1,", "1 ", "-", "{,}", "\\", "1,\\! ", "$ ", "\\frac{"]
)
def test_extract_number_takes_linear_time(text):
    start = time.thread_time()
    for ending in ("", "5", "x"):
        extract_number(text * 100_000 + ending)
        is_number(text * 100_000 + ending)
    assert time.thread_time() - start < 30


@pytest.mark.skipif(not os.path.exists(CASES), reason="no grader cases beside the clone")
@pytest.mark.parametrize("name", ["21_grading_gsm8k", "20_grading_math"])
def test_rows_from_the_field(name):
    with open(os.path.join(SHARED, f"cases/field/{name}.jsonl"), encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    rule = {"gsm8k": grade, "math": grade_boxed}[rows[0]["dataset"]]
    wrong = [r["id"] for r in rows if bool(rule(r["response"], r["ground_truth"])) != r["expected"]]
    assert len(rows) >= 8 and wrong == []


def test_a_response_that_was_cut_off_gets_nothing():
    tokenizer = chain.make_tokenizer()
    ids = tokenizer("#### 5")["input_ids"]
    samples = [Sample([*ids, 1], [], True, False), Sample(ids, [], False, False)]
    samples.append(Sample([1], [], True, False))
    assert grade_all(tokenizer, samples, ["5", "5", "5"], "####") == [1.0, 0.0, 0.0]


def test_grade_all_by_the_datasets_rule():
    tokenizer = chain.make_tokenizer()
    ids = tokenizer("#### 5")["input_ids"]
    samples = [Sample(ids, [], True, False)]
    assert grade_all(tokenizer, samples, ["5"], "####") == [1.0]
    assert grade_all(tokenizer, samples, ["5"], "boxed") == [0.0]


# ---- files ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_grading_a_file(tmp_path):
    rows = [
        {"id": "a", "dataset": "math", "response": r"\boxed{1/2}", "ground_truth": "0.5"},
        {"id": "b", "dataset": "math", "response": r"\boxed{1/3}", "ground_truth": "0.5"},
        {"id": "c", "dataset": "gsm8k", "response": "#### 5", "ground_truth": "5"},
        {"id": "d", "dataset": "gsm8k", "response": None, "response_parts": [["#### 5", 2]]}
        | {"ground_truth": "5", "expected": False},
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n\n".join(map(json.dumps, rows)))
    output = call("-m", "common.grading", str(path)).stdout
    assert output.startswith("accuracy 0.500 (2/4)\nd: True, expected False: ")
    assert "failures: timeout 0, crash 0, repeat 0" in output
    path.write_text(json.dumps(rows[0]) + "\n{}")
    assert (
        f"{path}:2: not a row to grade"
        in call("-m", "common.grading", str(path), fails=True).stderr
    )


@pytest.mark.skipif(not os.path.exists(CASES), reason="no grader cases beside the clone")
def test_cases_also_in_threads():
    with open(CASES, encoding="utf-8") as file:
        cases = [json.loads(line) for line in file]
    responses = [
        "".join(text * times for text, times in case["response_parts"])
        if case["response"] is None
        else case["response"]
        for case in cases
    ]
    answers = [case["ground_truth"] for case in cases]
    rules = [{"gsm8k": grade, "math": grade_boxed}[case["dataset"]] for case in cases]

    def graded(i: int) -> bool:
        return bool(rules[i](responses[i], answers[i]))

    mathequal.worker.cache.clear()
    before = dict(mathequal.worker.failures)
    verdicts = list(map(graded, range(len(cases))))
    expected = [case["expected"] for case in cases]
    agreed = sum(v == e for v, e in zip(verdicts, expected, strict=True))
    assert len(cases) > 200 and agreed >= 0.99 * len(cases)
    assert not any(v and not e for v, e in zip(verdicts, expected, strict=True))
    assert mathequal.worker.failures == before
    assert not os.path.exists("GRADER_PWNED")
    mathequal.worker.cache.clear()
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(graded, range(len(cases)))) == verdicts
