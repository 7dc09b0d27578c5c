"""Rules of analysis/allocation.py and --smoothing, against all outcomes of small cases."""

import itertools
import math

import pytest
import torch

from analysis import allocation, price
from analysis.allocation import Draw, Response
from experiments import vineppo_cheap
from tests.conftest import ROOT

P = (0.3, 0.8, 0.55)  # the values of three states


def expected_values(rule: allocation.Rule, draws: int) -> list[float]:
    """E[value of each state], over all outcomes of `draws` draws from each of three states."""
    expected = [0.0] * 3
    for outcome in itertools.product((0.0, 1.0), repeat=3 * draws):
        of_state = [outcome[i * draws : (i + 1) * draws] for i in range(3)]
        chance = math.prod(p if x else 1 - p for p, xs in zip(P, of_state, strict=True) for x in xs)
        draws_of = [[Draw(x, []) for x in xs] for xs in of_state]
        (values,), _ = rule([Response(0, [1, 2, 3], [1, 2, 3], 1.0, draws_of)])
        expected = [e + chance * v for e, v in zip(expected, values, strict=True)]
    return expected


FAIR = {
    "own": allocation.own(2),
    "bisection": allocation.bisection(3, 1),
    "sequential, fair": allocation.sequential(2, 4, fair=True),
    "sequential, fair, of three": allocation.sequential(3, 4, fair=True),
}


@pytest.mark.parametrize("name", FAIR)
def test_fair_rules_have_no_bias(name):
    assert expected_values(FAIR[name], 4) == pytest.approx(P)


def test_the_group_is_fair_to_a_prompt():
    """Another response of the prompt, right with the prompt's value, and two draws."""
    rule = allocation.with_group(allocation.shared(2), 2)
    expected = 0.0
    for other, *draws in itertools.product((0.0, 1.0), repeat=3):
        chance = math.prod(P[0] if x else 1 - P[0] for x in (other, *draws))
        of_state = [[Draw(x, []) for x in draws]]
        batch = [Response(0, [1], [1], reward, of_state) for reward in (1.0, other)]
        (values, _), _ = rule(batch)
        expected += chance * values[0]
    assert expected == pytest.approx(P[0])


def test_reuse_along_the_chain_is_fair():
    """From the prompt a draw takes the response's step with .7 and is then right with .8, else
    with .3; two draws, and two from the state behind the step."""
    steps = [([1, 9], 1.0, 0.7 * 0.8), ([1, 9], 0.0, 0.7 * 0.2)]
    steps += [([2, 9], 1.0, 0.3 * 0.3), ([2, 9], 0.0, 0.3 * 0.7)]
    ends = [([9], 1.0, 0.8), ([9], 0.0, 0.2)]
    expected = [0.0, 0.0]
    for outcome in itertools.product(steps, steps, ends, ends):
        chance = math.prod(p for _, _, p in outcome)
        draws = [Draw(x, ids) for ids, x, _ in outcome]
        response = Response(0, [1, 9], [1, 2], 1.0, [draws[:2], draws[2:]])
        (values,), _ = allocation.along(2)([response])
        expected = [e + chance * v for e, v in zip(expected, values, strict=True)]
    assert expected == pytest.approx([0.7 * 0.8 + 0.3 * 0.3, 0.8])


def test_responses_of_the_group_count_as_rollouts():
    """Three rollouts valued 1/3 and two others that are right, or one of them."""
    values = [[1 / 3, 0.5], [1 / 3], [1 / 3], [0.0], [0.0, 0.7], [0.0]]
    rewards = torch.tensor([1.0, 1, 0, 0, 0, 0])
    found = vineppo_cheap.add_responses(values, rewards, k=3, group_size=3)
    assert found == [[2 / 5, 0.5], [2 / 5], [3 / 5], [0.0], [0.0, 0.7], [0.0]]
    assert vineppo_cheap.add_responses(values, rewards, 3, 1) == values


def test_draws_that_decide_and_estimate_are_biased():
    found = expected_values(allocation.sequential(2, 4), 4)
    assert max(abs(v - p) for v, p in zip(found, P, strict=True)) > 0.01


def test_a_fair_stop_is_hardly_better_than_its_first_draws():
    """Why sequential rules lose: without bias, three draws and then up to nine are as noisy as four
    at most, whatever the state's value."""
    rule = allocation.sequential(3, 9, fair=True)
    for p in (0.05, 0.2, 0.5, 0.9):
        second = 0.0
        for outcome in itertools.product((0.0, 1.0), repeat=9):
            ((value,),), _ = rule([Response(0, [1], [1], 1.0, [[Draw(x, []) for x in outcome]])])
            second += math.prod(p if x else 1 - p for x in outcome) * value**2
        variance = second - p**2
        assert p * (1 - p) / 4 < variance <= p * (1 - p) / 3 + 1e-9


def test_tokens_and_reuse():
    """Two responses of a prompt share their first step: the tokens that each rule needs."""
    one, other = [1, 2, 3], [1, 2, 4]
    follows = Draw(1.0, [1, 2, 5])  # takes the first step of both
    draws = [[follows, Draw(0.0, [7])], [Draw(0.0, [5, 5]), Draw(0.0, [5])]]
    again = [[Draw(1.0, [8]), Draw(1.0, [9, 9])], [Draw(1.0, [5, 5, 5]), Draw(1.0, [5])]]
    batch = [Response(0, one, [2, 3], 1.0, draws), Response(0, other, [2, 3], 0.0, again)]
    assert allocation.own(2)(batch) == ([[0.5, 0.0], [1.0, 1.0]], 4 + 3 + 3 + 4)
    assert allocation.shared(2)(batch) == ([[0.5, 0.0], [0.5, 0.0]], 7)
    assert allocation.shared(2, pooled=True)(batch) == ([[0.75, 0.5], [0.75, 0.5]], 14)
    assert allocation.along(2)(batch) == ([[0.5, pytest.approx(1 / 3)], [1.0, 1.0]], 14)
    grouped = allocation.with_group(allocation.own(2), 2)(batch)
    assert grouped == ([[pytest.approx(1 / 3), 0.0], [1.0, 1.0]], 14)
    another = [batch[0], batch[1]._replace(group=1)]
    assert allocation.shared(2)(another)[1] == 14


def test_bisection_spends_little_where_the_ends_agree():
    def response(rewards):
        return Response(0, [1] * 5, [1, 2, 3, 4, 5], 1.0, [[Draw(x, [1])] * 4 for x in rewards])

    rule = allocation.bisection(4, 1)
    assert rule([response([0.0] * 5)])[1] == 4 + 1 + 1 + 1 + 4
    assert rule([response([0.0, 0.0, 0.0, 1.0, 1.0])])[1] == 4 + 1 + 4 + 4 + 4
    assert rule([response([0.5] * 5)])[1] == 5 * 4


def test_the_tables_of_the_page_are_those_that_are_written():
    """Their heads and names; the numbers take hours."""
    with open(f"{ROOT}/docs/credit.md") as file:
        rows = [line.split(" | ") for line in file if line.startswith("| ")]
    cosines = {key: [0.3, 0.4] for key in [*allocation.RULES, allocation.EXACT]}
    written = allocation.make_table(dict.fromkeys(allocation.RULES, 1), cosines).splitlines()
    assert "| sharing | 3 | 1.00 | 0.000 ± 0.000 |" in written
    rules = [line.split(" | ")[:2] for line in written if line.startswith("| ")]
    schemes = [[f"| {name}"] for name in price.SCHEMES]
    assert [row[:1] for row in rows[2 : len(schemes) + 2]] == schemes
    assert [row[:2] for row in rows[len(schemes) + 2 :]] == rules


@pytest.mark.parametrize("smoothing", [0.0, 0.5, 1.0])
def test_smoothing_by_hand(smoothing):
    """Steps change the value by .25, -.5, .75; neighbours get smoothing^distance of it."""
    advantages = vineppo_cheap.compute_advantages(
        torch.tensor([1.0, 0.0]),
        [[0.5, 0.75, 0.25], [0.5]],
        [[2, 3, 5], [3]],
        torch.tensor([[1.0, 1, 1, 1, 1], [1, 1, 1, 0, 0]]),
        smoothing,
    )
    a, b, c = 0.25, -0.5, 0.75
    first, second = a + b * smoothing + c * smoothing**2, b + (a + c) * smoothing
    third = c + b * smoothing + a * smoothing**2
    expected = [[first, first, second, third, third], [-0.5, -0.5, -0.5, 0, 0]]
    torch.testing.assert_close(advantages, torch.tensor(expected))


@pytest.fixture
def float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("smoothing", [0.0, 0.3, 0.5, 1.0])
def test_smoothing_leaves_the_gradient_unbiased(smoothing, float64):
    """A policy of three binary steps, rewards by a table: the expected gradient over all eight
    responses is that of the mean reward, for every smoothing. With exact values: noise enters
    linearly, so its mean stands for it."""
    torch.manual_seed(0)
    logits = torch.randn(7, dtype=torch.float64, requires_grad=True)  # a state: a prefix of bits
    reward_of = torch.rand(8, dtype=torch.float64)
    chance = logits.sigmoid()

    def node(bits):
        return 2 ** len(bits) - 1 + int("".join(map(str, bits)) or "0", 2)

    def probability(bits, after=()):
        odds = [chance[node(bits[:i])] for i in range(len(after), len(bits))]
        return math.prod(
            p if bit else 1 - p for p, bit in zip(odds, bits[len(after) :], strict=True)
        )

    everything = list(itertools.product((0, 1), repeat=3))

    def value(after):
        ends = [bits for bits in everything if bits[: len(after)] == after]
        return sum(probability(bits, after) * reward_of[node(bits) - 7] for bits in ends)

    (wanted,) = torch.autograd.grad(value(()), logits, retain_graph=True)
    found = torch.zeros(7, dtype=torch.float64)
    for bits in everything:
        values = [[value(bits[:i]).item() for i in range(3)]]
        reward = reward_of[node(bits) - 7][None]
        steps, mask = [[1, 2, 3]], torch.ones(1, 3)
        advantages = vineppo_cheap.compute_advantages(reward, values, steps, mask, smoothing)[0]
        logprob = sum(advantages[i] * probability(bits[: i + 1], bits[:i]).log() for i in range(3))
        (gradient,) = torch.autograd.grad(logprob, logits, retain_graph=True)
        found += probability(bits).detach() * gradient
    torch.testing.assert_close(found, wanted)
