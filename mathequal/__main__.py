"""python -m mathequal FILE.jsonl     grades a file of responses, see `grade_file`"""

import json
import sys
import time
from collections.abc import Callable

from mathequal import grade_boxed, worker


def grade_file(path: str, graders: dict[str, Callable[[str, str], float]]) -> None:
    """Grades JSONL rows and prints how many verdicts are as expected. A row has "dataset" (a key of
    `graders`), "response" (or null and "response_parts", [[text, times], ...], which are joined),
    "ground_truth" and, if known, the verdict "expected" (default true)."""
    sys.stdout.reconfigure(errors="backslashreplace")  # an answer may not fit the terminal
    rows = []
    with open(path, encoding="utf-8-sig") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
                if row["response"] is None:
                    row["response"] = "".join(text * times for text, times in row["response_parts"])
                rows.append((row, graders[row["dataset"]], row["response"], row["ground_truth"]))
            except (ValueError, KeyError, TypeError) as error:
                sys.exit(f"error: {path}:{number}: not a row to grade: {error!r}")
    if not rows:
        sys.exit(f"error: {path}: no rows")
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
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        sys.exit("usage: python -m mathequal FILE.jsonl")
    grade_file(sys.argv[1], {"math": grade_boxed})
