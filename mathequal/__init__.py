"""Do two MATH answers say the same? Exactly, and without evaluating text.

boxes.py         a response -> the answer in its last box; is that the reference?
process.py       asks a process of its own, with hard limits of time and memory
equivalence.py   that process: are two answers equal?
answers.py       what an answer says: numbers, sets, intervals, matrices, ...

`python -m mathequal FILE.jsonl` grades a file of responses; docs/grading.md has more.
"""

from mathequal.boxes import extract_boxed, grade_boxed
from mathequal.process import worker

__all__ = ["extract_boxed", "grade_boxed", "worker"]
