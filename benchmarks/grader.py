r"""How long grading a VinePPO iteration on MATH takes, against math-verify on every response.

    python -m benchmarks.grader --data-dir FOLDER     a folder with MATH's train.jsonl

The batch has the structure of an iteration: problems x responses x steps x rollouts. A response is
the problem's reference solution with another box: the answer in one of a few spellings, or one of
the problem's typical mistakes, the first far more often than the last. So answers repeat, as they
do when 9 rollouts start from each step of 8 responses.
"""

import json
import os
import random
import re
import time
from dataclasses import dataclass

import tyro

import mathequal
from common import require
from common.steps import RULES


@dataclass
class Args:
    data_dir: str
    """folder with train.jsonl, whose rows have "problem" and "solution" fields"""
    num_responses: int = 46_000
    """responses of the batch, which is cut off there"""
    num_prompts: int = 64
    """problems of an iteration"""
    group_size: int = 8
    """responses per problem"""
    k: int = 9
    """rollouts per state"""
    accuracy: float = 0.4
    """share of the responses whose answer is right"""
    sample: int = 300
    """responses on which math-verify is timed; its time for all of them is extrapolated"""
    seed: int = 4


def spellings(answer: str) -> list[str]:
    """Ways to write the answer, the given one first."""
    other = answer.replace(r"\frac", r"\dfrac") if "frac" in answer else rf"{answer}\text{{ units}}"
    return [answer, f" {answer} ", other, re.sub(r"(?<=[+=,-])", " ", answer), f"x = {answer}"]


def mistakes(answer: str, rng: random.Random, others: list[str]) -> list[str]:
    """What might be written instead: digits and signs changed, other problems' answers."""
    found = []
    for _ in range(60):
        digits = list(re.finditer(r"\d", answer))
        if digits and rng.random() < 0.8:
            at = rng.choice(digits).start()
            found.append(answer[:at] + str(rng.randrange(10)) + answer[at + 1 :])
        else:
            found.append(rng.choice([f"-{answer}", f"2({answer})", rng.choice(others)]))
    return found


def make_batch(args: Args) -> list[tuple[str, str]]:
    """(response, answer) in the order in which an iteration grades them."""
    path = os.path.join(args.data_dir, "train.jsonl")
    require(os.path.exists(path), f"{path}: no such file")
    with open(path, encoding="utf-8-sig") as file:
        solutions = [json.loads(line)["solution"] for line in file if line.strip()]
    rng = random.Random(args.seed)
    usable = [s for s in solutions if (a := mathequal.extract_boxed(s)) and rf"\boxed{{{a}}}" in s]
    answers = [mathequal.extract_boxed(solution) for solution in usable]
    batch = []
    for problem in rng.sample(range(len(usable)), args.num_prompts):
        solution, answer = usable[problem], answers[problem]
        wrong = mistakes(answer, rng, answers)
        before, _, after = solution.rpartition(rf"\boxed{{{answer}}}")
        states = len(RULES["math"](solution))
        for _ in range(args.group_size * states * args.k):
            right = rng.random() < args.accuracy
            words, rate = (spellings(answer), 0.7) if right else (wrong, 0.15)
            said = words[min(int(rng.expovariate(rate)), len(words) - 1)]
            batch.append((f"{before}\\boxed{{{said}}}{after}", answer))
    require(
        len(batch) >= args.num_responses,
        f"only {len(batch)} responses: try another --seed or more --num-prompts",
    )
    return batch[: args.num_responses]


def seconds_of(grade, batch: list[tuple[str, str]]) -> float:
    start = time.perf_counter()
    for response, answer in batch:
        grade(response, answer)
    return time.perf_counter() - start


def main(args: Args) -> None:
    from math_verify import parse, verify

    batch = make_batch(args)
    said = {(mathequal.extract_boxed(response), answer) for response, answer in batch}
    print(
        f"{len(batch)} responses, {1 - len(said) / len(batch):.1%} repeat an earlier one's answer"
    )
    mathequal.worker.equal("0", "1")  # its start is not counted: once a run
    mathequal.worker.cache.clear()
    cached = seconds_of(mathequal.grade_boxed, batch)
    print(f"cache            {cached:8.1f} s")

    def grade_anew(response: str, answer: str) -> float:
        mathequal.worker.cache.clear()
        return mathequal.grade_boxed(response, answer)

    anew = seconds_of(grade_anew, batch)
    print(f"no cache         {anew:8.1f} s (but the worker remembers what it has read)")
    sample = random.Random(args.seed).sample(batch, args.sample)
    library = seconds_of(
        lambda response, answer: verify(parse(f"${answer}$"), parse(response)), sample
    )
    library *= len(batch) / len(sample)
    print(f"math-verify      {library:8.1f} s, extrapolated from {len(sample)} drawn at random")
    print(f"times faster     {library / cached:8.0f} with the cache, {library / anew:.1f} without")
    print(f"failures         {mathequal.worker.failures}")


if __name__ == "__main__":
    main(tyro.cli(Args))
