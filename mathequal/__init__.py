"""Do two MATH answers say exactly the same? Without running any of their text as code.

boxes.py         finds the answer in a response's last box, and grades it
process.py       starts and asks a process of its own, with hard limits of time and memory
equivalence.py   that process: are two answers equal?
answers.py       what an answer says: numbers, sets, intervals, matrices, ...

`python -m mathequal FILE.jsonl` grades a file of responses; docs/grading.md has more.
"""

from mathequal.boxes import extract_boxed, grade_boxed
from mathequal.process import worker

__all__ = ["extract_boxed", "grade_boxed", "worker"]
