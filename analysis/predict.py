"""How much a VinePPO response should be worth, before its gradient is computed: docs/when.md.

A token's part of the gradient is advantage x score, score = grad log P(token). Its noise is about
the mean of advantage^2 |score|^2: RLOO's advantage is R - b, VinePPO's V(s_{i+1}) - V(s_i), and K
rollouts add V (1 - V) / K at both ends of the step. (Left out: what tokens' scores have in common,
and that prompts differ, which is the same for all estimators.) Where a token does not matter, score
and advantage are independent; if, too, values change evenly over S steps, a response is worth

    W = G / (G - 1) / (1 / S + 1 / K)

of RLOO's with groups of G. Where a token decides the outcome, they are not: a rare mistake has a
large score, with an advantage of -V in VinePPO, but of only -p in RLOO (p: mean reward). There W is
smaller, and can be below 1. `predict` adds up both kinds, for a policy that is a table of facts.
"""

import random

import torch

from analysis.exact import DIGITS, OPS, exact_values, read_digits, read_prompt

Noise = dict[tuple[str, float], float]  # (kind of token, K; 0: exact values, -1: RLOO) -> noise


def closed_form(k: float, steps: float, group_size: int = 8) -> float:
    """W where no token matters."""
    return group_size / (group_size - 1) / (1 / steps + 1 / k)


def demonstrators_table(problems: list[tuple[str, str, str]], temperature: float) -> torch.Tensor:
    """(2, 11, 10, 11) P(result | operation, digit, operand) of solutions, at a temperature; 0 for
    facts without any."""
    table = torch.zeros(2, len(DIGITS), 10, len(DIGITS))
    for prompt, _, solution in problems:
        digits = read_digits(prompt, solution.splitlines(keepends=True))
        for (op, operand), digit, result in zip(
            read_prompt(prompt)[1], digits[:-1], digits[1:], strict=True
        ):
            table[OPS.index(op), digit, operand, result] += 1
    table = (table / table.sum(dim=-1, keepdim=True).clamp(min=1)) ** (1 / temperature)
    return table / table.sum(dim=-1, keepdim=True).clamp(min=1e-9)


def score_of(probabilities: torch.Tensor, choice: int) -> float:
    """|grad log P(choice)|^2 with respect to the logits."""
    return (1 - 2 * probabilities[choice] + probabilities.square().sum()).item()


def simulate(
    problems: list[tuple[str, str, str]], table: torch.Tensor, group_size: int = 8
) -> tuple[Noise, float]:
    """(noise of a response, mean reward), of groups of responses: for K = 0, 1 and RLOO, and for
    results (|score|^2 with respect to their logits) and other words (1 a line) apart."""
    rng = random.Random(0)
    noise: Noise = {}
    total = 0.0
    for prompt, answer, _ in problems:
        digit, operations = read_prompt(prompt)
        values = exact_values(prompt, table).tolist()
        group = []
        for _ in range(group_size):
            digits, scores = [digit], []
            for op, operand in operations:
                of = table[OPS.index(op), digits[-1], operand]
                if not of.any():  # a fact that was never seen: as if lost
                    of = torch.eye(len(DIGITS))[-1]
                digits.append(rng.choices(range(len(DIGITS)), of.tolist())[0])
                scores.append(score_of(of, digits[-1]))
            group.append((digits, scores, float(digits[-1] == int(answer))))
        total += (right := sum(reward for *_, reward in group))
        for digits, scores, reward in group:
            at = [values[i][d] for i, d in enumerate(digits)]
            for i, score in enumerate(scores):
                change = (at[i + 1] - at[i]) ** 2
                rollouts = at[i] * (1 - at[i]) + at[i + 1] * (1 - at[i + 1])
                rloo = (reward - (right - reward) / (group_size - 1)) ** 2
                for k, square in ((-1, rloo), (0, change), (1, change + rollouts)):
                    for kind, mass in (("results", score), ("words", 1.0)):
                        noise[kind, k] = noise.get((kind, k), 0.0) + mass * square
    count = len(problems) * group_size
    return {key: x / count for key, x in noise.items()}, total / count


def predict(noise: Noise, k: float, weights: dict[str, float]) -> float:
    """W with K rollouts a state (0: with exact values); `weights`: of the kinds of tokens."""
    rloo, exact, one = (sum(weights[kind] * noise[kind, i] for kind in weights) for i in (-1, 0, 1))
    return rloo / (exact + (one - exact) / k if k else exact)
