r"""The answer in the last box of a response, and whether it is right."""

import re

from mathequal.process import worker

BOX = re.compile(r"(?P<box>\\{1,2}(?:boxed|fbox)(?![a-zA-Z]))|\\.|[{}]", re.DOTALL)
BOXED_TOKEN = re.compile(r"\s{0,9}([-+]?\d[^\s$]{0,99}|[\w\\(+-][^\s$]{0,99}(?=\s?\$))")
SPACE = r"(?:\\[,;:! ]|~|\s)+"  # which says nothing, except between digits
SPACING = re.compile(rf"\\(?:left|right)(?![a-zA-Z])|\\?\$|(?<!\d){SPACE}|{SPACE}(?!\d)")
MAX_LENGTH = 1_000  # characters of an answer; a longer one equals only its own spelling


def extract_boxed(text: str) -> str | None:
    r"""The content of the last complete, non-empty `\boxed{}` or `\fbox{}`; None without one.

    `\boxed 9` counts, the bare word `\boxed` in a sentence does not. Takes linear time.
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


def grade_boxed(response: str, answer: str) -> float:
    r"""1.0 iff the response's last box says the same as `answer` (a MATH answer, without its box):
    the spelling is the same but for spaces, or equivalence.py finds them equal, in a worker process
    with hard limits of time and memory. Failures of the worker count in `worker.failures`.
    """
    predicted = extract_boxed(response)
    if predicted is None or not answer.strip():
        return 0.0
    pair = SPACING.sub("", predicted), SPACING.sub("", answer)
    if pair[0] == pair[1]:
        return 1.0
    if max(map(len, pair)) > MAX_LENGTH:
        return 0.0
    return float(worker.equal_cached(pair, predicted, answer))
