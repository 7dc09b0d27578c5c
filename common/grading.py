r"""Response and answer -> reward. Nothing that a model writes is ever evaluated.

python -m common.grading FILE.jsonl     grades a file of responses, see `main`
"""

import json
import os
import re
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Annotated, NamedTuple

import tyro

from common import UsageError, require

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


# ---- MATH: the last box --------------------------------------------------------------------------

BOX = re.compile(r"(?P<box>\\{1,2}(?:boxed|fbox)(?![a-zA-Z]))|\\.|[{}]", re.DOTALL)
BOXED_TOKEN = re.compile(r"\s{0,9}([-+]?\d[^\s$]{0,99}|[\w\\(+-][^\s$]{0,99}(?=\s?\$))")
SPACE = r"(?:\\[,;:! ]|~|\s)+"  # which says nothing, except between digits
SPACING = re.compile(rf"\\(?:left|right)(?![a-zA-Z])|\\?\$|(?<!\d){SPACE}|{SPACE}(?!\d)")
MAX_LENGTH = 1_000  # characters of an answer; a longer one equals only its own spelling


def extract_boxed(text: str) -> str | None:
    r"""What the last complete `\boxed{}` or `\fbox{}` that is not empty holds, None without one.

    `\boxed 9` counts, the bare word `\boxed` in a sentence does not. Linear in the text.
    """
    boxes: list[tuple[int, int]] = []  # (start, end) of what stands in a box, in order of the ends
    opened: list[tuple[int, bool]] = []  # braces that wait for their partner; whether of a box
    awaited = -1  # where the brace of a box has to be
    for match in BOX.finditer(text):
        if match["box"]:
            awaited = re.compile(r"\s*").match(text, match.end()).end()
            bare = BOXED_TOKEN.match(text, match.end())
            if bare:
                boxes.append(bare.span(1))
        elif match[0] == "{":
            opened.append((match.end(), match.start() == awaited))
        elif match[0] == "}" and opened:
            start, of_box = opened.pop()
            if of_box:
                boxes.append((start, match.start()))
    for start, end in reversed(boxes):
        content = " ".join(text[start:end].split())
        if len(content) > MAX_LENGTH:
            return content
        if re.sub(
            r"\\(?:boxed|fbox|text\w*\{\s*\})|\\phantom\{[^{}]*\}|\\[,;:! ]|[{}~.\s]", "", content
        ):
            return content
    return None


TIME_LIMIT, START_LIMIT = 5, 120  # seconds for a pair (some hundredths, as a rule), for the imports


class Worker:
    """`python -m common.equivalence`, started when it is first asked and again when it died; one
    question at a time, from any thread. Not multiprocessing: that would import the training script
    once more, or fork beside CUDA's and gloo's threads."""

    def __init__(self) -> None:
        self.failures = {"timeout": 0, "crash": 0, "repeat": 0}
        self.reset()
        os.register_at_fork(after_in_child=self.reset)  # a forked process gets its own

    def reset(self) -> None:
        self.lock, self.process = threading.Lock(), None

    def equal(self, answer: str, reference: str) -> bool | None:
        """None where the worker fails: then it is killed, and that is counted and said."""
        with self.lock:
            try:
                if self.process is None:
                    self.start()
                self.process.stdin.write(json.dumps([answer, reference]).encode() + b"\n")
                self.process.stdin.flush()
                reply = self.read_line(TIME_LIMIT)
            except BrokenPipeError:
                reply = b""
            if reply in (b"true\n", b"false\n"):
                return reply == b"true\n"
            self.stop()
            failure = "timeout" if reply is None else "crash"
            self.failures[failure] += 1
            what = f"{answer!r:.80} against {reference!r:.80}"
            print(f"warning: {failure} grading {what}: wrong ({self.failures})", file=sys.stderr)
            return None

    def take_failures(self) -> int:
        """Answers that counted as wrong because of one, since the last call; their pairs will be
        tried again."""
        taken = sum(self.failures.values())
        self.failures = dict.fromkeys(self.failures, 0)
        for pair in [pair for pair, verdict in cache.items() if verdict is None] if taken else ():
            del cache[pair]
        return taken

    def start(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "common.equivalence"],
            cwd=os.path.dirname(os.path.dirname(os.path.abspath(__file__))),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONHASHSEED": "0"},  # sympy's ways, and so verdicts, repeat
            start_new_session=True,  # Ctrl-C is not for it; it ends with this process
        )
        if self.read_line(START_LIMIT) != b"ready\n":
            self.stop()
            raise RuntimeError("python -m common.equivalence does not start")

    def read_line(self, seconds: float) -> bytes | None:
        """A line, b"" when the worker has died, None when time is up."""
        ready, _, _ = select.select([self.process.stdout], [], [], seconds)
        return self.process.stdout.readline() if ready else None

    def stop(self) -> None:
        self.process.kill()
        self.process.communicate()
        self.process = None


worker = Worker()
cache: dict[tuple[str, str], bool | None] = {}  # verdicts on pairs that are not spelled alike
CACHE_SIZE = 200_000


def grade_boxed(response: str, answer: str) -> float:
    r"""1.0 iff the response's last box holds what the answer (a MATH answer, without its box) says:
    the same spelling but for spaces, or else what equivalence.py finds equal, in a worker process
    with hard limits of time and memory; a worker that fails counts in `worker.failures`.
    """
    predicted = extract_boxed(response)
    if predicted is None or not answer.strip():
        return 0.0
    pair = SPACING.sub("", predicted), SPACING.sub("", answer)
    if pair[0] == pair[1]:
        return 1.0
    if max(map(len, pair)) > MAX_LENGTH:
        return 0.0
    if pair not in cache:
        if len(cache) >= CACHE_SIZE:
            cache.clear()
        cache[pair] = worker.equal(predicted, answer)
    elif cache[pair] is None:  # the same again would take the time limit again
        worker.failures["repeat"] += 1
    return float(cache[pair] or 0)


class Rule(NamedTuple):
    is_gradable: Callable[[str], bool]
    grade: Callable[[str, str], float]


RULES = {
    "####": Rule(is_gradable, grade),
    "boxed": Rule(lambda answer: bool(answer.strip()), grade_boxed),
}

# ---- of token ids --------------------------------------------------------------------------------


def grade_all(
    tokenizer,
    response_ids: list[list[int]],
    finished: list[bool],
    answers: list[str],
    rule: str,
) -> list[float]:
    """Rewards of responses as ids; one that was cut off at the limit gets 0 whatever it says.
    `rule` is a key of RULES: what the dataset's answers look like."""
    texts = tokenizer.batch_decode(response_ids, skip_special_tokens=True)
    return [
        RULES[rule].grade(text, answer) if done else 0.0
        for text, done, answer in zip(texts, finished, answers, strict=True)
    ]


# ---- of a file -----------------------------------------------------------------------------------


def main(path: Annotated[str, tyro.conf.Positional]) -> None:
    """Grades JSONL rows: "dataset" ("gsm8k" or "math"), "response" (or null and "response_parts",
    [[text, times], ...] to be joined), "ground_truth" and, where it is known, "expected"."""
    rules = {"gsm8k": "####", "math": "boxed"}
    rows = []
    with open(path, encoding="utf-8-sig") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
                if row["response"] is None:
                    row["response"] = "".join(text * times for text, times in row["response_parts"])
                grader = RULES[rules[row["dataset"]]].grade
                rows.append((row, grader, row["response"], row["ground_truth"]))
            except (ValueError, KeyError, TypeError) as error:
                raise UsageError(f"{path}:{number}: not a row to grade: {error!r}") from None
    require(rows, f"{path}: no rows")
    verdicts, seconds = [], []
    for _, grader, response, answer in rows:
        start = time.perf_counter()
        verdicts.append(bool(grader(response, answer)))
        seconds.append(time.perf_counter() - start)
    agreed = [
        verdict == row.get("expected", True)
        for (row, *_), verdict in zip(rows, verdicts, strict=True)
    ]
    print(f"accuracy {sum(agreed) / len(rows):.3f} ({sum(agreed)}/{len(rows)})")
    for (row, _, response, answer), verdict, agrees in zip(rows, verdicts, agreed, strict=True):
        if "expected" in row and not agrees:
            print(f"{row.get('id')}: {verdict}, expected {row['expected']}: ", end="")
            print(f"{response[-100:]!r} against {answer[:100]!r}")
    print("failures:", ", ".join(f"{kind} {count}" for kind, count in worker.failures.items()))
    print(f"{len(rows) / sum(seconds):.0f} responses a second, slowest {max(seconds):.2f} s")


if __name__ == "__main__":
    tyro.cli(main)
