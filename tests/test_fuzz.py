"""Whatever a model or a file may hold: nothing raises, hangs, executes, or moves a cursor.

Inputs are pieces of what breaks graders, in any order, and any other text; `make soak` makes 40
times as many. LONG are what repetition makes of them: all must take linear time, or nearly (a page
of newlines took the line rule 8 seconds once).
"""
# ruff: noqa: E501, SIM905

import io
import json
import os
import sys
import time
from contextlib import redirect_stdout
from html.parser import HTMLParser

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import mathequal
import mathequal.process
from analysis import credit
from common import UsageError, data, grading, run, steps
from tests.conftest import ROOT

PIECES = r"""\boxed{ \fbox{ \boxed } { ^ _ ^{ \frac \frac{ }{ \dfrac12 \sqrt \sqrt[ ] 9 0 -1 1e9 0.5 .5 1/3
10000000000 99999999! ! !! \binom{ \infty \pi x y e i ( ) [ ) , ; : < > = \leq \ne \pm \cup \cap \in | \left(
\right) \left \right . % \% \$ $ $$ $a. ^\circ \text{ \mathrm{ \begin{pmatrix} \end{pmatrix} & \\ \\\\ ** //
\overline{ \log_ \sin \cos^{-1} _{10} \{ \} \cdots \dots and or #### ####-5 $1,234 \displaystyle [asy] [/asy]
\begin{align*} \end{align*} \[ \] . ? Question: __import__('os').mkdir('EXECUTED') lambda:0 {{7*7}} ${7*7}
<script>alert(1)</script> </td> <!-- --> & &amp; %s {0} NaN Infinity None True""".split()
PIECES += [
    "\n",
    "\n\n",
    " ",
    "\t",
    "\r\n",
    "\x00",
    "\x1b[2J",
    "\x1b]0;title\x07",
    "\u202e",
    "\u2028",
    "\ud800",
]
PIECES += [
    "\u2212",
    "\uff11",
    "\u0661",
    "\u0301",
    "\ufeff",
    "\U0001f600",
    "<|endoftext|>",
    "\\",
    "^" * 40,
    "{" * 40,
]
TEXT = st.lists(st.sampled_from(PIECES) | st.text(max_size=5), max_size=25).map("".join)
ANSWERS = st.sampled_from(
    ["5", r"\frac{1}{2}", "(1,2)", "x^2+1", r"\sqrt{2}", "1,234", r"\text{yes}", "[0,\\infty)"]
)
SLOW = (HealthCheck.too_slow, HealthCheck.data_too_large)
TIMES = int(os.environ.get("FUZZ_TIMES", "1"))  # `make soak` sets it


def fuzz(examples: int):
    """The same examples each time: a test that fails only sometimes is of no use to CI."""
    return settings(
        max_examples=examples * TIMES, deadline=None, derandomize=True, suppress_health_check=SLOW
    )


LONG = [
    "\\boxed{" * 50_000,
    "\\boxed{" + "{" * 30_000,
    "\\boxed{" + "9^{" * 300 + "9" + "}" * 300 + "}",
    "\\boxed{((((((((((((((((((((((((((((((1))))))))))))))))))))))))))))))}",
    "\\boxed{" + "-" * 900 + "1}",
    "\\boxed{\\frac" * 80 + "}" * 80,
    "#### " + "9" * 100_000,
    "####" * 300_000,
    "$" * 30_001 + "." * 30_000,
    "\n" * 600_000,
    "[asy]" * 9_000,
    "\\begin{align*}" * 3_000,
]


@pytest.fixture(scope="module", autouse=True)
def in_a_folder(tmp_path_factory):
    before = os.getcwd()
    os.chdir(tmp_path_factory.mktemp("fuzz"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mathequal.process, "TIME_LIMIT", 600)  # a busy machine decides nothing
        yield
    assert os.listdir() == [] and not os.path.exists(f"{ROOT}/EXECUTED")  # by the worker
    os.chdir(before)


@pytest.mark.parametrize("text", LONG, ids=range(len(LONG)))
def test_long_ones_are_soon_wrong_and_lossless(text):
    start = time.thread_time()
    assert grading.grade(text, "5") == mathequal.grade_boxed(text, "5") == 0.0
    for rule in steps.RULES.values():
        assert [*rule(text)][-1] == len(text)
    assert time.thread_time() - start < 30  # a busy machine changes nothing; some hundredths


@fuzz(400)
@given(TEXT)
def test_grading_returns_0_or_1(text):
    assert grading.grade(text, "5") in (0.0, 1.0)
    content = mathequal.extract_boxed(text)
    assert content is None or content.strip()
    assert grading.extract_number(text) is None or float(grading.extract_number(text)) is not None


FORMS = r"""\frac{%s}{%s} %s^{%s} (%s,%s) \sqrt[%s]{%s} \binom{%s}{%s} %s+%s %s%s %s!%s \left[%s,%s\right) %s\cup%s
%s=%s \log_{%s}{%s} \text{%s}%s \{%s,%s\} %s_{%s} \begin{pmatrix}%s\\%s\end{pmatrix} %s\%%%s %s^\circ%s
\sin%s\cos^{-1}{%s} -%s*%s""".split()
ATOMS = st.sampled_from(
    [*"0129xyei", *r"99999999 10000000000 0.5 \pi \infty \sqrt2 1e9".split(), ""]
)
FORMULA = st.recursive(
    ATOMS | TEXT.map(lambda text: text.replace("{", "").replace("}", "")),
    lambda inner: st.builds(lambda form, a, b: form % (a, b), st.sampled_from(FORMS), inner, inner),
    max_leaves=8,
)


@fuzz(150)
@given(FORMULA, ANSWERS | FORMULA)
@example(r"\sqrt[0]{5}", "5")
@example("0", r"\infty^{0}")
@example(r"\binom{10000000000}{5}", "x^2+1")
def test_answers_are_compared_in_time(text, answer):
    """In the worker, in what it gives itself; a failure would be counted, so there was none."""
    before = dict(mathequal.worker.failures)
    assert mathequal.worker.equal(text, answer) in (True, False)
    assert mathequal.grade_boxed("so \\boxed{" + text + "}", answer) in (0.0, 1.0)
    assert mathequal.worker.failures == before, text


@fuzz(200)
@given(TEXT, st.sampled_from(sorted(steps.RULES)))
def test_steps_are_lossless(text, rule):
    ends = steps.RULES[rule](text)
    assert ends == sorted(set(ends)) and ends[-1] == len(text)


JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=5,
)
ROWS = st.fixed_dictionaries(
    {}, optional={name: JSON | TEXT for name in ("prompt", "answer", "solution", "id")}
)
LINES = ROWS.map(json.dumps) | JSON.map(json.dumps) | TEXT


@fuzz(250)
@given(st.lists(LINES, max_size=4), st.sampled_from(["\n", "\r\n", "\n\n"]), st.binary(max_size=3))
def test_a_file_gives_problems_or_one_error_that_names_it(tmp_path_factory, lines, end, junk):
    folder = tmp_path_factory.mktemp("data", numbered=True)
    text = end.join(lines).encode("utf-8", "surrogatepass")
    (folder / "train.jsonl").write_bytes(text + junk)
    try:
        problems = data.load_problems("jsonl", "train", str(folder))
    except UsageError as error:
        assert str(folder / "train.jsonl") in str(error)
        assert len(str(error)) < 1_000 and "\x1b" not in str(error)
    else:
        for problem in problems:
            assert problem.prompt.strip() and grading.is_gradable(problem.answer)
            problem.prompt.encode()
    (folder / "train.jsonl").unlink()
    folder.rmdir()


class Tags(HTMLParser):
    def __init__(self, page: str):
        super().__init__()
        self.found: set[str] = set()
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.found.add(tag)
        assert not any(name.startswith("on") or name in ("src", "href") for name, _ in attrs)


def is_plain(shown: str) -> bool:
    return all(c.isprintable() or c == "\n" for c in shown)


@fuzz(100)
@given(TEXT, TEXT)
def test_what_a_model_writes_is_shown_as_it_is(tmp_path_factory, prompt, text):
    """In the terminal, in a log that knows ASCII only, in episodes.jsonl and in the HTML page."""
    logger = run.Run.__new__(run.Run)
    logger.folder, logger.is_main, logger.shows_episode = ".", True, True
    with redirect_stdout(
        io.TextIOWrapper(io.BytesIO(), encoding="ascii", errors="backslashreplace")
    ):
        stream = sys.stdout
        logger.episode(1, prompt, [text], [0.5], [0.5], 1.0)
        stream.flush()
        shown = stream.buffer.getvalue().decode()
    assert is_plain(shown) and shown.count("\n") == 4
    with open("episodes.jsonl") as file:
        (line,) = file.readlines()
    os.remove("episodes.jsonl")
    saved = json.loads(line)
    assert (saved["prompt"], saved["steps"][0]["text"]) == (prompt, text)
    episode = {"prompt": prompt, "answer": text, "reward": 1.0}
    episode["steps"] = [{"text": text, "value": 0.5, "VinePPO": 0.5, "GRPO": 1.0}]
    assert is_plain(credit.as_text("any", episode, coloured=False))
    page = credit.as_page({prompt: episode}, text)
    page.encode()
    tags = {"html", "head", "meta", "title", "style", "body", "h1", "h2", "p", "pre", "table"}
    assert Tags(page).found <= tags | {"tr", "th", "td"}
