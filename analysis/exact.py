"""Exact values on the embedded task, by dynamic programming.

How a response can end depends on its running digit and on the remaining operations. A policy that
looks at nothing else is a table, P(result | operation, digit, operand), from which the values of
all states follow, from the last operation back to the first. A trained policy may look at more:
`python -m analysis.gradient` prints how far the prompts' mean value is from the mean reward.
"""

import re

import torch

from tasks.chain import LOST, apply_operation

LINE = re.compile(r"(?:[a-z]+ )*([\d?])([+-])(\d)=([\d?])(?: [a-z]+)*\n")  # with fillers or without
OPS = "+-"
DIGITS = "0123456789" + LOST  # running digits: LOST is the eleventh


def read_prompt(prompt: str) -> tuple[int, list[tuple[str, int]]]:
    """`2-3+8=?` -> 2, [("-", 3), ("+", 8)]."""
    operations = re.findall(r"([+-])(\d)", prompt)
    return int(prompt[0]), [(op, int(operand)) for op, operand in operations]


def read_digits(prompt: str, step_texts: list[str]) -> list[int] | None:
    """The running digit with which each step of a response starts, the answer line's included; 10:
    lost. None for a response that is not one line for each operation of the prompt (with its digit,
    operation and operand) and an answer line."""
    digit, operations = read_prompt(prompt)
    digits = [digit]
    if len(step_texts) != len(operations) + 1:
        return None
    for (op, operand), text in zip(operations, step_texts, strict=False):
        match = LINE.fullmatch(text)
        if not match or match.groups()[:3] != (DIGITS[digits[-1]], op, str(operand)):
            return None
        digits.append(DIGITS.index(match[4]))
    return digits


def exact_values(prompt: str, table: torch.Tensor) -> torch.Tensor:
    """(S, D) values of the states in which step i starts with digit d. The last step is the answer
    line, right if d is. `table` (2, D, 10, D): P(result | operation, digit, operand). D: 10, or 11
    with the digit `LOST`."""
    digit, operations = read_prompt(prompt)
    for op, operand in operations:
        digit = apply_operation(digit, op, operand)
    values = [torch.eye(table.shape[-1])[digit]]
    for op, operand in reversed(operations):
        values.append(table[OPS.index(op), :, operand] @ values[-1])
    return torch.stack(values[::-1])
