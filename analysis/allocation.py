"""Where to spend rollouts: rules that turn draws (rollouts) into values, compared with the exact
values and the exact gradient of the embedded task. No training, some minutes; see docs/credit.md.

    python -m analysis.allocation --model runs/sft/hf
    python -m analysis.allocation --model runs/bare/sft/hf  without filler words

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
    each of them and the mean of all (candidate 1)."""

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
    """The other responses of its group are draws from a prompt, and cost nothing (candidate 2)."""

    def with_responses(batch):
        values, tokens = rule(batch)
        for response, of_row in zip(batch, values, strict=True):
            others = [r.reward for r in batch if r.group == response.group and r is not response]
            of_row[0] = (k * of_row[0] + sum(others)) / (k + len(others))
        return values, tokens

    return with_responses


def along(k: int) -> Rule:
    """A draw that takes the response's own step, token for token, is a draw from the next state
    too, and so on along the response (candidate 2)."""

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
    """K draws at both ends of a response. Where their values are both 0 or both 1, `few` for each
    state between them; else K for the middle one, and so on for both halves (candidate 3). A
    state's own draws never decide how many it gets, so each value is fair."""

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
    """`first` draws; K where they do not agree (candidate 4). Their mean is biased, since they
    decide when to stop. `fair`: the mean of the first draw given what is known at the stop
    (Girshick, Mosteller and Savage 1946), the best without bias. Where the first draws agree, it is
    their mean; elsewhere it makes up for the bias of those."""

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


RULES: dict[str, tuple[Rule, float]] = {  # name -> (rule, smoothing)
    **{f"K {k} for every state": (own(k), 0.0) for k in (9, 5, 3, 2, 1)},
    **{f"K {k}, equal prefixes once": (shared(k), 0.0) for k in (9, 3, 1)},
    **{f"1 K {k}, sharers pool theirs": (shared(k, pooled=True), 0.0) for k in (9, 3, 1)},
    **{f"2 K {k}, reuse of the group": (with_group(shared(k), k), 0.0) for k in (9, 3, 1)},
    **{f"2 K {k}, reuse along the chain": (along(k), 0.0) for k in (9, 3, 1)},
    "3 bisection, 9 or 3": (bisection(9, 3), 0.0),
    "3 bisection, 9 or 1": (bisection(9, 1), 0.0),
    "3 bisection, 5 or 1": (bisection(5, 1), 0.0),
    "4 three, then nine": (sequential(3, 9), 0.0),
    "4 the same, fair": (sequential(3, 9, fair=True), 0.0),
    **{f"5 K {k}, smoothing .5": (own(k), 0.5) for k in (9, 5, 3, 2, 1)},
    **{f"2 + 5 K {k}, group, smoothing .5": (with_group(shared(k), k), 0.5) for k in (5, 3, 2, 1)},
}


def by_fifth(exact: list[float], values: list[float]) -> list[list[float]]:
    """Values of the states whose exact value is in [0, .2), [.2, .4), ..."""
    fifths: list[list[float]] = [[] for _ in range(5)]
    for known, value in zip(exact, values, strict=True):
        fifths[min(4, int(known * 5))].append(value)
    return fifths


def bias(found: list[list[list[float]]], plain: list[list[list[float]]]) -> tuple[float, float]:
    """Values of a rule and of the plain one, by batch and fifth -> the difference of means and its
    standard error over batches, for the fifth in which it is the most standard errors."""
    worst = (0.0, math.inf)
    for fifth in range(5):
        pairs = zip((b[fifth] for b in found), (b[fifth] for b in plain), strict=True)
        less = [statistics.mean(x) - statistics.mean(y) for x, y in pairs if x]
        if len(less) > 2 and error(less):
            worst = max(worst, (statistics.mean(less), error(less)), key=lambda w: abs(w[0] / w[1]))
    return worst


def main(
    model: str = "runs/sft/hf",
    batches: int = 24,
    num_prompts: int = 8,
    group_size: int = 8,
    exact_episodes: int = 4096,
    temperature: float = 0.6,
    seed: int = 1,
) -> None:
    sizes = batches, num_prompts, group_size, exact_episodes, 9
    study = make_study(model, *sizes, temperature, seed)
    size = num_prompts * group_size
    cosines: dict[str, list[float]] = {name: [] for name in ["exact values", *RULES]}
    tokens = dict.fromkeys(RULES, 0)
    fifths: dict[str, list[list[list[float]]]] = {name: [] for name in RULES}
    squares: dict[str, list[float]] = {name: [] for name in RULES}
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

        def measure(name, values, smoothing, inputs=(rewards, ends, mask, logprobs)):
            rewards, ends, mask, logprobs = inputs
            advantages = vineppo_cheap.compute_advantages(rewards, values, ends, mask, smoothing)
            cosines[name].append(cosine(study, logprobs, advantages, mask))

        chains = [row for row, e in enumerate(episodes) if e.digits]
        exact = [value for row in chains for value in known[row]]
        measure("exact values", known, 0.0)
        for name, (rule, smoothing) in RULES.items():
            values, used = rule(batch)
            tokens[name] += used
            measure(name, values, smoothing)
            flat = [value for row in chains for value in values[row]]
            fifths[name].append(by_fifth(exact, flat))
            squares[name] += [(x - v) ** 2 for x, v in zip(flat, exact, strict=True)]

    plain = next(iter(RULES))
    print(f"\n{batches} iterations of {size} episodes. Bias: the mean value less that of the first")
    print("rule, in the fifth of the exact values where it is the most standard errors.\n")
    print("| rule | tokens | of the first | bias | rms error of values | cosine | less the first |")
    print("|---|---|---|---|---|---|---|")
    for name, found in cosines.items():
        less = [a - b for a, b in zip(found, cosines[plain], strict=True)]
        shown = [f"{statistics.mean(x):.3f} ± {error(x):.3f}" for x in (found, less)]
        parts = [""] * 4
        if name in RULES:
            off, its_error = bias(fifths[name], fifths[plain])
            rms = math.sqrt(statistics.mean(squares[name]))
            share = tokens[name] / tokens[plain]
            parts = [f"{tokens[name] / batches:,.0f}", f"{share:.2f}"]
            same = math.isinf(its_error)  # smoothing changes no value
            parts += ["" if same else f"{off:+.3f} ± {its_error:.3f}", f"{rms:.3f}"]
        print(f"| {' | '.join([name, *parts, *shown])} |")


def error(values: list[float]) -> float:
    return statistics.stdev(values) / math.sqrt(len(values))


if __name__ == "__main__":
    tyro.cli(main)
