"""Where to spend rollouts: rules that turn draws into values, against the exact gradient of the
embedded task. No training, some minutes; docs/credit.md has the tables and the verdicts.

    python -m analysis.allocation --model runs/sft/hf

A rule gets the responses of an iteration with all draws from each of their states. It returns a
value for each state, and how many tokens the draws took that it used. Which draws a rule may see
decides whether its values are fair (unbiased): tests/test_allocation.py checks all outcomes.
"""

import itertools
import math
import statistics
from collections.abc import Callable
from typing import NamedTuple

import torch
import tyro
from tqdm import tqdm

import vineppo
from analysis.gradient import Draw, cosine, known_values, make_study, pad
from experiments import vineppo_cheap


class Response(NamedTuple):
    group: int  # which prompt
    ids: list[int]
    ends: list[int]  # of its steps
    reward: float
    draws: list[list[Draw]]  # from each state in which a step starts


Values = list[list[float]]  # for each response, for each of its states
Rule = Callable[[list[Response]], tuple[Values, int]]  # -> values, tokens of the draws used


def mean(draws: list[Draw]) -> float:
    return sum(draw.reward for draw in draws) / len(draws)


def cost(draws: list[Draw]) -> int:
    return sum(len(draw.ids) for draw in draws)


def own(k: int) -> Rule:
    """K draws from every state of every response: the plain scheme."""

    def rule(batch):
        used = [[of_state[:k] for of_state in response.draws] for response in batch]
        values = [[mean(draws) for draws in of_row] for of_row in used]
        return values, sum(cost(draws) for of_row in used for draws in of_row)

    return rule


def shared(k: int, pooled: bool = False) -> Rule:
    """Equal prefixes of a prompt are one state: K draws for all that share it, or, pooled, K for
    each of them and the mean of all."""

    def rule(batch):
        used: dict[tuple, list[Draw]] = {}
        keys = []
        for response in batch:
            starts = [0, *response.ends[:-1]]
            keys.append([(response.group, *response.ids[:start]) for start in starts])
            for key, draws in zip(keys[-1], response.draws, strict=True):
                if pooled or key not in used:
                    used[key] = used.get(key, []) + draws[:k]
        values = [[mean(used[key]) for key in of_row] for of_row in keys]
        return values, sum(map(cost, used.values()))

    return rule


def with_group(rule: Rule, k: int) -> Rule:
    """The other responses of its group are draws from a prompt, for nothing."""

    def with_responses(batch):
        values, tokens = rule(batch)
        for response, of_row in zip(batch, values, strict=True):
            others = [r.reward for r in batch if r.group == response.group and r is not response]
            of_row[0] = (k * of_row[0] + sum(others)) / (k + len(others))
        return values, tokens

    return with_responses


def along(k: int) -> Rule:
    """A draw that takes the response's own step, token for token, is a draw from the next state
    too, and so on along the response."""

    def rule(batch):
        values, tokens = [], 0
        for response in batch:
            carried: list[Draw] = []
            of_row = []
            starts = itertools.pairwise([0, *response.ends])
            for (start, end), draws in zip(starts, response.draws, strict=True):
                usable = draws[:k] + carried
                of_row.append(mean(usable))
                tokens += cost(draws[:k])
                step = response.ids[start:end]
                same = [draw for draw in usable if draw.ids[: len(step)] == step]
                carried = [Draw(draw.reward, draw.ids[len(step) :]) for draw in same]
            values.append(of_row)
        return values, tokens

    return rule


def bisection(k: int, few: int) -> Rule:
    """K draws at both ends of a response; where they agree at 0 or at 1, `few` for each state
    between them, else K for the middle one, and so on for both halves. A state's own draws never
    decide how many it has, so each value is fair."""

    def value_of(draws: list[list[Draw]]) -> tuple[list[float], int]:
        last = len(draws) - 1
        counts = {0: k, last: k}

        def value(i: int) -> float:
            return mean(draws[i][: counts[i]])

        def split(a: int, b: int) -> None:
            if b - a < 2:
                return
            if value(a) == value(b) and value(a) in (0, 1):
                counts.update(dict.fromkeys(range(a + 1, b), few))
                return
            middle = (a + b) // 2
            counts[middle] = k
            split(a, middle)
            split(middle, b)

        split(0, last)
        tokens = sum(cost(draws[i][:n]) for i, n in counts.items())
        return [value(i) for i in range(last + 1)], tokens

    def rule(batch):
        values, tokens = zip(*(value_of(response.draws) for response in batch), strict=True)
        return list(values), sum(tokens)

    return rule


def sequential(first: int, k: int, fair: bool = False) -> Rule:
    """`first` draws; K where they do not agree. The mean of the draws is biased, for they decide
    when to stop. `fair`: the mean of the first draw given what is known at the stop (Girshick,
    Mosteller and Savage 1946), the best that has no bias. Where the first agree it is their mean
    again, and else it must make up for those."""

    def paths(draws: int, right: int) -> int:
        return math.comb(draws, right) if right >= 0 else 0

    def fair_value(right: int) -> float:  # of K, of which the first ones did not agree
        all_right, rest = paths(k - first, right - first), k - first
        begin_right = paths(k - 1, right - 1) - all_right
        return begin_right / (paths(k, right) - all_right - paths(rest, right))

    def rule(batch):
        values, tokens = [], 0
        for response in batch:
            of_row = []
            for draws in response.draws:
                agree = mean(draws[:first]) in (0, 1)
                used = draws[:first] if agree else draws[:k]
                right = round(sum(draw.reward for draw in used))
                of_row.append(fair_value(right) if fair and not agree else mean(used))
                tokens += cost(used)
            values.append(of_row)
        return values, tokens

    return rule


Key = tuple[str, str]  # name, K
RULES: dict[Key, tuple[Rule, float]] = {  # -> rule, smoothing
    **{("plain", f"{k}"): (own(k), 0.0) for k in (9, 3, 1)},
    **{("sharing", f"{k}"): (shared(k), 0.0) for k in (9, 3, 1)},
    **{("smoothing alone", f"{k}"): (own(k), 0.5) for k in (9, 1)},
    **{("smoothing and reuse", f"{k}"): (with_group(shared(k), k), 0.5) for k in (3, 1)},
    ("pooling", "1"): (shared(1, pooled=True), 0.0),
    ("reuse along the response", "1"): (along(1), 0.0),
    ("bisection", "5 or 1"): (bisection(5, 1), 0.0),
    ("sequential", "3 or 9"): (sequential(3, 9), 0.0),
    ("sequential, unbiased", "3 or 9"): (sequential(3, 9, fair=True), 0.0),
}
EXACT, PLAIN = ("exact values", ""), ("plain", "9")


def show(values: list[float]) -> str:
    """Mean and standard error."""
    return f"{statistics.mean(values):.3f} ± {statistics.stdev(values) / len(values) ** 0.5:.3f}"


def make_table(tokens: dict[Key, int], cosines: dict[Key, list[float]]) -> str:
    """Of all iterations' tokens and each iteration's cosine, by rule."""
    rows = ["| rule | K | tokens | difference in cosine |", "|---|---|---|---|"]
    for key, found in cosines.items():
        less = [a - b for a, b in zip(found, cosines[PLAIN], strict=True)]
        share = f"{tokens[key] / tokens[PLAIN]:.2f}" if key in tokens else ""
        rows.append(f"| {' | '.join([*key, share, show(less)])} |")
    return "\n".join(rows)


def main(
    model: str = "runs/sft/hf",
    batches: int = 24,
    num_prompts: int = 8,
    group_size: int = 8,
    exact_episodes: int = 4096,
    temperature: float = 0.6,
    seed: int = 1,
) -> None:
    args = vineppo.Args(model=model, dtype="float32", gpu_memory_utilization=0.4)
    args.num_prompts, args.group_size, args.k = num_prompts, group_size, 9
    args.temperature, args.seed = temperature, seed
    study = make_study(args, batches, exact_episodes)
    size = num_prompts * group_size
    cosines: dict[Key, list[float]] = {key: [] for key in [*RULES, EXACT]}
    tokens = dict.fromkeys(RULES, 0)
    for first in tqdm(range(0, len(study.episodes), size), desc="rules"):
        episodes = study.episodes[first : first + size]
        draws = study.draws[first : first + size]
        batch = [
            Response(row // group_size, e.ids, e.ends, e.reward, of)
            for row, (e, of) in enumerate(zip(episodes, draws, strict=True))
        ]
        inputs = pad(episodes, study.policy.device)
        mask = inputs[-1].cpu()
        ends = [e.ends for e in episodes]
        rewards = torch.tensor([e.reward for e in episodes])
        known = [known_values(study, e) for e in episodes]
        logprobs = vineppo.compute_logprobs(study.policy, *inputs, temperature)

        def measure(key, values, smoothing, inputs=(rewards, ends, mask, logprobs)):
            rewards, ends, mask, logprobs = inputs
            advantages = vineppo_cheap.compute_advantages(rewards, values, ends, mask, smoothing)
            cosines[key].append(cosine(study, logprobs, advantages, mask))

        measure(EXACT, known, 0.0)
        for key, (rule, smoothing) in RULES.items():
            values, used = rule(batch)
            tokens[key] += used
            measure(key, values, smoothing)

    print(f"\nPlain, K = 9: cosine {show(cosines[PLAIN])},")
    print(f"{tokens[PLAIN] / batches:,.0f} tokens per iteration.\n")
    print(make_table(tokens, cosines))


if __name__ == "__main__":
    tyro.cli(main)
