"""The forks of vineppo.py that follow its successors: is the expected estimate the gradient, and is
a tree computed as its branches would be, each alone?"""

import math

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import vineppo
from common import UsageError, steps
from common.batches import Batch
from experiments import trees, vineppo_tree, vineppo_unsure
from tests.conftest import SMALL, call, read_jsonl
from tests.test_steps import enumerate_policy, float64, make_tokenizer, random_tree  # noqa: F401


def values_of(tree: dict, reward: dict) -> dict[tuple, float]:
    """The mean reward of what goes on from each prefix."""
    values = dict(reward)
    for prefix in sorted(tree, key=len, reverse=True):
        values[prefix] = sum(p * values[(*prefix, i)] for i, p in tree[prefix].items())
    return values


def true_gradient(tree: dict, reward: dict) -> dict[tuple, float]:
    """Of the mean reward, with respect to the logit of each choice."""
    values, reached = values_of(tree, reward), {(): 1.0}
    found = {}
    for prefix, choices in tree.items():  # shorter ones first
        for i, p in choices.items():
            reached[(*prefix, i)] = reached[prefix] * p
            found[prefix, i] = reached[prefix] * p * (values[(*prefix, i)] - values[prefix])
    return found


def add_scores(found: dict, tree: dict, ids: tuple, start: int, credit: list[float]) -> None:
    """Adds credit x gradient of the log-prob, for the tokens from `start` on."""
    for t, given in enumerate(credit, start=start):
        for i, q in tree[ids[:t]].items():
            key = ids[:t], i
            found[key] = found.get(key, 0.0) + given * ((i == ids[t]) - q)


def errors(found: dict, true: dict) -> float:
    return max(abs(found.get(key, 0.0) - x) for key, x in true.items())


def response_advantages(ids: tuple, ends: list[int], values: dict, reward: float) -> list[float]:
    measured = [[values[ids[:start]] for start in [0, *ends[:-1]]]]
    mask = torch.ones(1, len(ids))
    return vineppo.compute_advantages(torch.tensor([reward]), measured, [ends], mask)[0].tolist()


@pytest.mark.parametrize(("below", "per_step"), [(0.2, 1), (0.25, 1), (0.25, 2), (1.0, 1)])
def test_states_after_unsure_tokens_leave_the_estimate_unbiased(below, per_step, float64):  # noqa: F811
    tree, reward = random_tree(4)
    values, found, numbers = values_of(tree, reward), {}, set()
    for ids, p in enumerate_policy(tree):
        logprobs = [math.log(tree[ids[:t]][i]) for t, i in enumerate(ids)]
        ends = vineppo_unsure.split_where_unsure(logprobs, below, per_step)
        assert ends[-1] == len(ids) and ends == sorted({*ends})
        numbers.add(len(ends))
        credit = response_advantages(ids, ends, values, reward[ids])
        add_scores(found, tree, ids, 0, [p * a for a in credit])
    assert errors(found, true_gradient(tree, reward)) < 1e-12 and len(numbers) > 1


def test_states_before_unsure_tokens_would_be_biased(float64):  # noqa: F811
    """Why the fork does not cut where Segment Policy Optimization does."""
    tree, reward = random_tree(4)
    values, found = values_of(tree, reward), {}
    for ids, p in enumerate_policy(tree):
        starts = [t for t, i in enumerate(ids) if t and tree[ids[:t]][i] < 0.2]
        credit = response_advantages(ids, [*starts, len(ids)], values, reward[ids])
        add_scores(found, tree, ids, 0, [p * a for a in credit])
    assert errors(found, true_gradient(tree, reward)) > 1e-4


def test_where_steps_end_by_hand():
    logs = [math.log(p) for p in (0.99, 0.5, 0.99, 0.4, 0.95, 0.3, 0.99)]
    assert vineppo_unsure.split_where_unsure(logs, 0.9, 1) == [2, 4, 6, 7]
    assert vineppo_unsure.split_where_unsure(logs, 0.9, 2) == [4, 7]
    assert vineppo_unsure.split_where_unsure(logs[:2], 0.9, 1) == [2]  # the end once
    assert vineppo_unsure.split_where_unsure([], 0.9, 1) == [0]


@pytest.mark.parametrize("weighted", [True, False])
def test_training_on_the_rollouts_too_leaves_the_estimate_unbiased(weighted, float64):  # noqa: F811
    """K = 1: all responses, with all rollouts from each of their states. Without the weights late
    steps would count more often than the policy visits them."""
    tree, reward = random_tree(3)
    values, found = values_of(tree, reward), {}
    responses, tokenizer = dict(enumerate_policy(tree)), make_tokenizer()
    ends_of = {ids: steps.split_steps(list(ids), tokenizer, "line") for ids in responses}

    def spread(start: int, ids: tuple, advantages: list[float]) -> list[float]:
        weights = vineppo_tree.weigh(start, list(ids), ends_of[ids], 1)
        given = zip(advantages[start:], weights, strict=True)
        return [a * w for a, w in given] if weighted else advantages[start:]

    for ids, p in responses.items():
        own = response_advantages(ids, ends_of[ids], values, reward[ids])
        add_scores(found, tree, ids, 0, [p * a for a in spread(0, ids, own)])
        for start in [0, *ends_of[ids][:-1]]:
            for rollout, q in responses.items():
                if rollout[:start] != ids[:start]:
                    continue
                reached = math.prod(tree[ids[:t]][ids[t]] for t in range(start))
                chance = p * q / reached
                (given,) = vineppo_tree.compare_siblings([reward[rollout]], reward[ids])
                credit = spread(start, rollout, [given] * len(rollout))
                add_scores(found, tree, rollout, start, [chance * a for a in credit])
    true = true_gradient(tree, reward)
    assert (errors(found, true) < 1e-12) == weighted and max(map(abs, true.values())) > 0.01


def test_siblings_and_weights_by_hand():
    # three rollouts with rewards 1, 0, 1 and a response with 0: the others' means are 1/3, 2/3, 1/3
    given = vineppo_tree.compare_siblings([1.0, 0.0, 1.0], 0.0)
    assert given == pytest.approx([2 / 3, -2 / 3, 2 / 3])
    # steps of two tokens; from the second one on: its step is visited 1 + 2 x 2 times, the next 7
    weights = vineppo_tree.weigh(2, [0] * 6, [2, 4, 6], 2)
    assert weights == pytest.approx([1 / 5, 1 / 5, 1 / 7, 1 / 7])


@pytest.fixture
def model():
    torch.manual_seed(0)
    sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2)
    config = LlamaConfig(vocab_size=40, max_position_embeddings=64, **sizes)
    return LlamaForCausalLM(config).eval()


def test_a_tree_is_computed_as_its_branches_alone(model):
    prompts = [[1, 2, 3], [4, 5]]
    branches = [
        [(0, [6, 7, 8, 9]), (0, [10, 11]), (2, [6, 7, 12, 13, 14]), (2, [6, 7, 15])],
        [(0, [16, 17]), (1, [16, 18, 19])],
    ]
    batch = trees.make_batch(prompts, branches, 1000, torch.device("cpu"))
    together = vineppo_tree.compute_logprobs(model, *batch.take([0, 1]), temperature=0.7)
    rows, alone = [], []
    for row, (prompt, of_row) in enumerate(zip(prompts, branches, strict=True)):
        place = 0
        for start, ids in of_row:
            single = Batch([prompt], [ids], 1000, torch.device("cpu"))
            whole = vineppo.compute_logprobs(model, *single.take([0]), temperature=0.7)
            expected = whole[0, start:]
            found = together[row, place : place + len(expected)]
            assert torch.allclose(found, expected, atol=1e-5)
            rows.append(found.sum() * (place + 1))
            alone.append(expected.sum() * (place + 1))
            place += len(expected)
        assert place == batch.response_mask[row].sum() and (together[row, place:] == 0).all()
    gradients = []
    for total in (sum(rows), sum(alone)):
        total.backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
        model.zero_grad()
    assert torch.allclose(*gradients, atol=1e-4) and gradients[0].norm() > 1


def test_what_a_tree_cannot_be_is_refused(model):
    branches = [[(0, [6, 7, 8]), (1, [6, 9])]]
    with pytest.raises(UsageError, match="have 6 tokens, --micro-batch-tokens is 5: raise it"):
        trees.make_batch([[1, 2]], branches, 5, torch.device("cpu"))
    model.config.sliding_window = 4
    with pytest.raises(UsageError, match="sliding window"):
        trees.attend(torch.zeros(1, 3, dtype=torch.long), model)


def test_rows_without_branches_are_those_of_the_parent(model):
    batch = Batch([[1, 2, 3], [4]], [[5, 6], [7, 8, 9, 10, 11]], 1000, torch.device("cpu"))
    ours = vineppo_tree.compute_logprobs(model, *batch.take([0, 1]), temperature=1.0)
    theirs = vineppo.compute_logprobs(model, *batch.take([0, 1]), temperature=1.0)
    assert torch.allclose(ours, theirs, atol=1e-5)


@pytest.mark.soak
@pytest.mark.parametrize("name", ["unsure", "tree"])
def test_a_fork_runs(name, sft_model, tmp_path):
    options = [*SMALL, "--num-iterations", "2", "--model", sft_model, "--temperature", "1.0"]
    options += ["--output-dir", str(tmp_path / "run")]
    call("-m", f"experiments.vineppo_{name}", *options, ranks=2)
    lines = read_jsonl(tmp_path / "run/metrics.jsonl")
    assert len(lines) == 2
    for line in lines:
        assert line["policy/sampler_gap"] < 1e-4 and 0 < line["policy/grad_norm"] < 100
        assert abs(line["policy/ratio"] - 1) < 0.05 and line["policy/skipped"] == 0
        assert line["tokens/rollouts"] > line["tokens/sample"]
