"""Estimators and losses on numbers worked out by hand, and what must hold for any numbers."""

import math
import random

import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import dpo_pos
import evaluate
import grpo
import ppo
import restem
import rloo
import vineppo
from common import batches, engines, ranks, run, sampling
from tests.conftest import call
from tests.gpu.trainer import OnlyAHead

# ---- advantages ----------------------------------------------------------------------------------


def ragged(values, step_index, mask) -> tuple[list[list[float]], list[list[int]]]:
    """(step values, step ends) of padded values and of the step of each token."""
    step_ends = []
    for of_row, length in zip(step_index.tolist(), mask.sum(dim=1).int().tolist(), strict=True):
        changes = [t for t in range(1, length) if of_row[t] != of_row[t - 1]]
        step_ends.append([*changes, length])
    rows = zip(values.tolist(), step_ends, strict=True)
    return [of_row[: len(ends)] for of_row, ends in rows], step_ends


def test_step_advantages_by_hand():
    """Steps of 2, 1 and 2 tokens valued .5, .75, .25 and reward 1; one step valued .5, reward 0."""
    advantages = vineppo.compute_advantages(
        rewards=torch.tensor([1.0, 0.0]),
        step_values=[[0.5, 0.75, 0.25], [0.5]],
        step_ends=[[2, 3, 5], [3]],
        response_mask=torch.tensor([[1.0, 1, 1, 1, 1], [1, 1, 1, 0, 0]]),
    )
    expected = [[0.25, 0.25, -0.5, 0.75, 0.75], [-0.5, -0.5, -0.5, 0, 0]]
    assert advantages.tolist() == expected


def random_steps(seed: int, batch: int = 6, tokens: int = 12):
    generator = torch.Generator().manual_seed(seed)
    rewards = torch.randint(0, 2, (batch,), generator=generator).float()
    lengths = torch.randint(1, tokens + 1, (batch,), generator=generator)
    lengths[0] = tokens
    mask = (torch.arange(tokens) < lengths[:, None]).float()
    starts = (torch.rand(batch, tokens, generator=generator) < 0.3) & mask.bool()
    starts[:, 0] = False
    step_index = starts.long().cumsum(dim=1)
    num_steps = step_index.amax(dim=1) + 1
    values = torch.rand(batch, int(num_steps.max()), generator=generator)
    return rewards, values, step_index, mask, starts


@pytest.mark.parametrize("seed", range(20))
def test_step_advantages_telescope(seed):
    """Summed over the steps of a response they are R - V(s_0), whatever the values between."""
    rewards, values, step_index, mask, starts = random_steps(seed)
    advantages = vineppo.compute_advantages(rewards, *ragged(values, step_index, mask), mask)
    first_tokens = starts.float()
    first_tokens[:, 0] = 1
    torch.testing.assert_close((advantages * first_tokens).sum(dim=1), rewards - values[:, 0])
    assert (advantages * (1 - mask) == 0).all()


def test_one_step_vineppo_is_rloo():
    """One step, and the other G - 1 responses as the rollouts of its state: the advantage is
    G / (G - 1) (R - group mean), leave-one-out. 3 right of 8: +.7143 and -.4286."""
    rewards = torch.tensor([1.0, 1, 1, 0, 0, 0, 0, 0])
    others = torch.stack([torch.cat([rewards[:i], rewards[i + 1 :]]) for i in range(8)])
    zeros, mask = torch.zeros(8, 3, dtype=torch.long), torch.ones(8, 3)
    values = others.mean(dim=1, keepdim=True)
    advantages = vineppo.compute_advantages(rewards, *ragged(values, zeros, mask), mask)
    torch.testing.assert_close(advantages[:, 0], 8 / 7 * (rewards - rewards.mean()))
    assert advantages[0, 0].item() == pytest.approx(5 / 7)
    assert advantages[3, 0].item() == pytest.approx(-3 / 7)


def test_whitening():
    advantages = torch.tensor([[1.0, 3.0, 9.0], [5.0, 0.0, 0.0]])
    mask = torch.tensor([[1.0, 1, 0], [1, 0, 0]])
    # 1, 3, 5: mean 3, unbiased variance 4
    expected = torch.tensor([[-1.0, 0, 0], [1, 0, 0]])
    torch.testing.assert_close(vineppo.whiten(advantages, mask), expected)


@pytest.mark.parametrize("value", [0.0, 0.1, -1 / 3])
def test_whitening_of_equal_advantages_is_exactly_zero(value):
    whitened = vineppo.whiten(torch.full((3, 5), value), torch.ones(3, 5))
    assert (whitened == 0).all()


def test_whitening_of_a_single_token():
    assert vineppo.whiten(torch.tensor([[2.0]]), torch.ones(1, 1)).tolist() == [[0.0]]


# ---- policy loss ---------------------------------------------------------------------------------


def policy_loss(ratio, advantage, ref=0.0, mask=None, num_tokens=1, num_responses=1, kl_coef=0.0):
    new = torch.tensor(ratio).log().reshape(1, -1).requires_grad_()
    mask = torch.ones_like(new) if mask is None else torch.tensor(mask).reshape(1, -1)
    advantages = torch.tensor(advantage).reshape(1, -1)
    refs = torch.full_like(new, ref)
    loss, sums = vineppo.compute_policy_loss(
        new,
        torch.zeros_like(new),
        refs.detach(),
        advantages,
        mask,
        num_tokens,
        num_responses,
        clip_coef=0.2,
        kl_coef=kl_coef,
    )
    loss.backward()
    return loss.item(), new.grad[0], sums


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "has_gradient"),
    [
        (1.5, 2.0, -2.4, False),  # good action, already more likely than 1.2: clipped
        (0.5, 2.0, -1.0, True),  # good action that became less likely: pulled back
        (1.5, -2.0, 3.0, True),  # bad action that became more likely: pushed down
        (0.5, -2.0, 1.6, False),  # bad action, already less likely than 0.8: clipped
        (1.1, 2.0, -2.2, True),
        (0.9, -2.0, 1.8, True),
    ],
)
def test_clipping_in_all_sign_and_side_cases(ratio, advantage, loss, has_gradient):
    value, gradient, sums = policy_loss([ratio], [advantage])
    assert value == pytest.approx(loss, abs=1e-6)
    # d(-A r)/d logprob = -A r inside, 0 where clipped
    expected = -advantage * ratio if has_gradient else 0.0
    assert gradient.item() == pytest.approx(expected, abs=1e-6)
    assert sums["policy/clip_fraction"] == float(abs(ratio - 1) > 0.2)


def test_kl_is_k3_summed_over_tokens():
    """d = ref - new = log 2 and -log 2: exp(d) - d - 1 = .3069 and .1931."""
    loss, gradient, sums = policy_loss([1.0, 4.0], [0.0, 0.0], ref=math.log(2), kl_coef=0.1)
    expected = (2 - math.log(2) - 1) + (0.5 + math.log(2) - 1)
    assert sums["policy/kl"].item() == pytest.approx(expected, abs=1e-6)
    assert loss == pytest.approx(0.1 * expected, abs=1e-6)  # num_responses 1: no mean over tokens
    torch.testing.assert_close(gradient, 0.1 * torch.tensor([1 - 2, 1 - 0.5]))  # 1 - exp(d)


@pytest.mark.parametrize("ref", [4.0, 100.0, -100.0])
def test_kl_is_clamped_without_nan(ref):
    loss, gradient, sums = policy_loss([1.0], [0.0], ref=ref, kl_coef=1.0)
    assert loss == 10 and gradient.item() == 0 and sums["policy/kl_clamped"] == 1


def test_padding_carries_no_loss_and_no_gradient():
    loss, gradient, sums = policy_loss([1.1, 3.0], [1.0, 5.0], ref=1.0, mask=[1.0, 0], kl_coef=1)
    alone, gradient_alone, sums_alone = policy_loss([1.1], [1.0], ref=1.0, kl_coef=1)
    assert loss == alone and gradient[0] == gradient_alone[0] and gradient[1] == 0
    assert sums == sums_alone


def test_learning_rate():
    rates = [vineppo.learning_rate_at(u, 100, 1.0, 0.03) for u in range(100)]
    assert rates[:4] == pytest.approx([1 / 3, 2 / 3, 1, 1])
    assert rates[-1] == pytest.approx(1 / 97)  # and 0 at the step after the last
    assert vineppo.learning_rate_at(0, 1, 1.0, 0.03) == 1.0


# ---- log-probs -----------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["untied llama", "tied llama", "gpt2"])
def model(request):
    torch.manual_seed(0)
    if request.param == "gpt2":  # absolute positions: a shift would show
        return GPT2LMHeadModel(GPT2Config(vocab_size=50, n_embd=32, n_layer=2, n_head=2)).eval()
    config = LlamaConfig(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        tie_word_embeddings=request.param.startswith("tied"),
    )
    return LlamaForCausalLM(config).eval()


def reference_logprobs(model, prompt, response, temperature):
    """Token by token, from the model's own logits."""
    logits = model(torch.tensor([prompt + response])).logits[0].float() / temperature
    rows = torch.log_softmax(logits, dim=-1)
    return torch.stack([rows[len(prompt) - 1 + t, token] for t, token in enumerate(response)])


def test_logprobs_of_each_row_alone_and_padded(model, monkeypatch):
    """Every response token carries its own log-prob: the first, the EOS that equals the padding
    (0), in rows of unlike lengths; and the gradient is that of the plain formula."""
    rows = [([5, 6, 7], [8, 9, 0]), ([5], [0]), ([3, 4], [1, 2, 3, 4, 5, 0])]
    input_ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(p + r) for p, r in rows], True)
    prompt_lens = torch.tensor([len(p) for p, _ in rows])
    mask = (torch.arange(6) < torch.tensor([[3], [1], [6]])).float()
    logprobs = vineppo.compute_logprobs(model, input_ids, prompt_lens, mask, 0.6)
    logprobs.sum().backward()
    gradients = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    references = [reference_logprobs(model, p, r, 0.6) for p, r in rows]
    for row, reference in enumerate(references):
        torch.testing.assert_close(logprobs[row, : len(reference)], reference, atol=1e-5, rtol=1e-5)
    assert (logprobs * (1 - mask) == 0).all()
    torch.cat(references).sum().backward()
    for gradient, parameter in zip(gradients, model.parameters(), strict=True):
        torch.testing.assert_close(gradient, parameter.grad, atol=1e-5, rtol=1e-4)
    model.zero_grad()


def test_logprobs_in_many_chunks(model):
    """More response tokens than one chunk holds."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 50, (30, 100), generator=generator)
    mask, lens = torch.ones(30, 90), torch.full((30,), 10)
    with torch.no_grad():
        logprobs = vineppo.compute_logprobs(model, ids, lens, mask, 1.0)
        expected = reference_logprobs(model, ids[7, :10].tolist(), ids[7, 10:].tolist(), 1.0)
    torch.testing.assert_close(logprobs[7], expected, atol=1e-5, rtol=1e-5)


def test_activations_computed_again_give_the_same_gradient():
    """--gradient-checkpointing: fewer tensors wait for the backward pass, dropout stays off."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 256}
    config = LlamaConfig(vocab_size=50, num_hidden_layers=4, attention_dropout=0.5, **sizes)
    model = LlamaForCausalLM(config).eval()
    inputs = torch.randint(0, 50, (8, 100)), torch.full((8,), 10), torch.ones(8, 90)

    def measure() -> tuple[list[torch.Tensor], int]:
        kept = 0

        def pack(tensor):
            nonlocal kept
            kept += tensor.nbytes
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            logprobs = vineppo.compute_logprobs(model, *inputs, 1.0)
        logprobs.sum().backward()
        gradients = [p.grad.clone() for p in model.parameters()]
        model.zero_grad()
        return gradients, kept

    gradients, all_kept = measure()
    engines.checkpoint_activations(model)
    again, kept = measure()
    assert kept < all_kept / 4
    for one, other in zip(gradients, again, strict=True):
        torch.testing.assert_close(one, other)


def test_lent_weights_are_copies_and_the_host_s_come_back(model, monkeypatch):
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    before = {name: (tensor.data_ptr(), tensor.clone()) for name, tensor in tensors.items()}
    ids = torch.tensor([[1, 2, 3]])
    expected = model(ids).logits
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "to", lambda self, device: self.clone())
        lent = engines.lend(model, torch.device("cpu"))
        lent.__enter__()
    assert all(tensor.data_ptr() != before[name][0] for name, tensor in tensors.items())
    assert torch.equal(model(ids).logits, expected)
    for tensor in tensors.values():
        tensor.data.zero_()
    assert not model(ids).logits.any()  # it computes with the copies
    lent.__exit__(None, None, None)
    for name, tensor in tensors.items():
        assert tensor.data_ptr() == before[name][0] and torch.equal(tensor, before[name][1])


def test_weight_distance_in_chunks(model, monkeypatch):
    torch.manual_seed(1)
    other = type(model)(model.config)
    flat, flat_other = (torch.nn.utils.parameters_to_vector(m.parameters()) for m in (model, other))
    expected = ((flat - flat_other).norm() / flat_other.norm()).item()
    for chunk in (engines.CHUNK, 77):
        monkeypatch.setattr(engines, "CHUNK", chunk)
        assert engines.weight_distance(model, other) == pytest.approx(expected, rel=1e-5)


# ---- batches -------------------------------------------------------------------------------------


def test_draw_has_no_repeats_inside_an_epoch_and_needs_no_skipping():
    whole = ranks.draw(10, 0, 25, 1)
    assert sorted(whole[:10]) == sorted(whole[10:20]) == list(range(10))
    assert whole[:10] != whole[10:20]
    assert [*ranks.draw(10, 0, 7, 1), *ranks.draw(10, 7, 8, 1), *ranks.draw(10, 15, 10, 1)] == whole
    assert ranks.draw(10, 0, 25, 2) != whole


def test_an_epoch_is_shuffled_once(monkeypatch):
    shuffle, calls = random.Random.shuffle, []
    monkeypatch.setattr(random.Random, "shuffle", lambda *a: (calls.append(1), shuffle(*a))[1])
    for minibatch in range(30):
        assert len(ranks.draw(100, minibatch * 10, 10, "a seed of this test")) == 10
    assert len(calls) == 3


def test_micro_batches_hold_every_row_once_within_the_budget():
    lengths = [5, 90, 17, 33, 64, 5, 41, 200]
    by_length = sorted(range(8), key=lengths.__getitem__)
    cuts = batches.cut(by_length, lengths, 100)
    assert [row for rows in cuts for row in rows] == by_length
    for rows in cuts:
        assert len(rows) == 1 or len(rows) * max(lengths[row] for row in rows) <= 100
    assert cuts[-1] == [7]  # longer than the budget: alone


@pytest.fixture
def batch():
    """Prompts of 2, 1 and 3 tokens, responses of 1, 4 and 2; six tokens fit a pass."""
    ranks.set_up()
    prompts, responses = [[1, 2], [3], [4, 5, 6]], [[7], [8, 9, 10, 11], [12, 13]]
    return batches.Batch(prompts, responses, 6, torch.device("cpu"))


def test_a_batch_by_hand(batch):
    assert batch.input_ids.tolist() == [[1, 2, 7, 0, 0], [3, 8, 9, 10, 11], [4, 5, 6, 12, 13]]
    assert batch.prompt_lens.tolist() == [2, 1, 3] and batch.response_lens == [1, 4, 2]
    assert batch.response_mask.tolist() == [[1, 0, 0, 0], [1, 1, 1, 1], [1, 1, 0, 0]]
    assert batch.passes([2, 0]) == [([0], 1.0), ([2], 1.0)]
    more = torch.arange(12).view(3, 4)
    ids, lens, mask, taken = batch.take([0], more)
    assert ids.tolist() == [[1, 2, 7]] and lens.tolist() == [2]
    assert mask.tolist() == [[1, 0, 0, 0]] and taken.tolist() == [[0, 1, 2, 3]]
    mapped = batch.map(lambda ids, lens, mask: mask * lens[:, None])
    assert mapped.tolist() == [[2, 0, 0, 0], [1, 1, 1, 1], [3, 3, 0, 0]]
    assert batch.count_padding() == 0
    batch.max_tokens = 15  # all in one pass, padded to five tokens
    assert batch.passes([2, 0, 1]) == [([0, 2, 1], 1.0)] and batch.count_padding() == 2


def test_minibatches_hold_every_row_once_in_an_order_of_the_seed():
    made = ranks.minibatches(12, 4, "a seed", 0)
    assert sorted(row for rows in made for row in rows) == list(range(12))
    assert [len(rows) for rows in made] == [4, 4, 4] and made == ranks.minibatches(
        12, 4, "a seed", 0
    )
    assert made != ranks.minibatches(12, 4, "a seed", 1)


@pytest.mark.parametrize("number", [1, 1023, 1024, 1025, 2500])
def test_scores_in_chunks_are_those_of_log_softmax(number):
    torch.manual_seed(0)
    head, hidden = torch.nn.Linear(8, 20), torch.randn(number, 8, requires_grad=True)
    tokens = torch.randint(0, 20, (number,))
    scores = engines.score(OnlyAHead(head), hidden, tokens, 0.7)
    expected = torch.log_softmax(head(hidden) / 0.7, dim=-1)[torch.arange(number), tokens]
    torch.testing.assert_close(scores, expected)
    found, wanted = (torch.autograd.grad(x.sum(), hidden)[0] for x in (scores, expected))
    torch.testing.assert_close(found, wanted)


def test_the_gap_by_hand():
    """Differences of 0.5 and 0.25 over three tokens; what is padding does not count."""
    samples = [sampling.Sample([1, 2], [-1.0, -2.0], True, False)]
    samples.append(sampling.Sample([1], [-3.0], True, False))
    logprobs = torch.tensor([[-1.5, -2.0], [-2.75, 9.0]])
    mask = torch.tensor([[1.0, 1.0], [1.0, 0.0]])
    assert sampling.measure_gap(samples, logprobs, mask) == pytest.approx(0.25)
    assert sampling.measure_gap(samples, torch.tensor([[-1.0, -2], [-3, 0]]), mask) == 0


def test_seeds_of_purposes_and_ranks_differ():
    seeds = {
        ranks.seed_of(seed, iteration, purpose, rank)
        for seed in (1, 2)
        for iteration in range(10)
        for purpose in ("sample", "rollouts")
        for rank in range(8)
    }
    assert len(seeds) == 320 and max(seeds) < 2**63


def test_mean_of_ignores_what_is_missing():
    assert run.mean_of([{"a": 1.0, "b": 2.0}, {"a": 3.0}]) == {"a": 2.0, "b": 2.0}


# ---- evaluation ----------------------------------------------------------------------------------


def test_bootstrap_interval_is_about_two_standard_errors():
    scores = [0.0] * 300 + [1.0] * 100
    low, high = evaluate.bootstrap_interval(scores, seed=0)
    error = math.sqrt(0.25 * 0.75 / 400)
    assert low == pytest.approx(0.25 - 1.96 * error, abs=0.005)
    assert high == pytest.approx(0.25 + 1.96 * error, abs=0.005)
    assert evaluate.bootstrap_interval([1.0, 1.0], seed=0) == (1.0, 1.0)
    for scores in ([1.0, 0.0], [0.0, 1.0]):  # each may be drawn alone
        assert evaluate.bootstrap_interval(scores, seed=0) == (0.0, 1.0)


# ---- groups --------------------------------------------------------------------------------------


def test_group_advantages_by_hand():
    """Rewards 1 1 0 0 0 of one prompt and 1 0 0 0 0 of another. GRPO: mean .4 and .2, population
    std .4899 and .4. RLOO: the others' mean is 1/4 or 2/4, and 0 or 1/4."""
    rewards = torch.tensor([1.0, 1, 0, 0, 0, 1, 0, 0, 0, 0])
    mask = torch.ones(10, 2)
    mask[3, 1] = 0
    advantages = grpo.compute_advantages(rewards, 5, mask)
    assert advantages[0].tolist() == pytest.approx([0.6 / 0.24**0.5] * 2)
    assert advantages[2, 0].item() == pytest.approx(-0.4 / 0.24**0.5)
    assert advantages[5, 0].item() == pytest.approx(2) and advantages[3, 1] == 0
    advantages = rloo.compute_advantages(rewards, 5, mask)
    assert advantages[0].tolist() == [0.75] * 2 and advantages[2, 0] == -0.5
    assert advantages[5, 0] == 1 and advantages[6, 0] == -0.25 and advantages[3, 1] == 0


@pytest.mark.parametrize("script", [grpo, rloo])
@pytest.mark.parametrize("value", [0.0, 1.0])
def test_groups_of_equal_rewards_give_exactly_zero(script, value):
    advantages = script.compute_advantages(torch.full((6,), value), 3, torch.ones(6, 4))
    assert (advantages == 0).all()


@pytest.mark.parametrize("script", [grpo, rloo])
@pytest.mark.parametrize("seed", range(5))
def test_groups_sum_to_zero_and_follow_their_rows(script, seed):
    generator = torch.Generator().manual_seed(seed)
    rewards = torch.randint(0, 2, (4, 8), generator=generator).float()
    mask = torch.ones(32, 1)
    advantages = script.compute_advantages(rewards.flatten(), 8, mask).view(4, 8)
    torch.testing.assert_close(advantages.sum(dim=1), torch.zeros(4), atol=1e-5, rtol=0)
    order = torch.randperm(8, generator=generator)
    moved = script.compute_advantages(rewards[:, order].flatten(), 8, mask).view(4, 8)
    torch.testing.assert_close(moved, advantages[:, order])


def test_rloo_is_one_step_vineppo():
    rewards = torch.tensor([1.0, 1, 1, 0, 0, 0, 0, 0])
    mask = torch.ones(8, 3)
    others = (rewards.sum() - rewards)[:, None] / 7
    steps = torch.zeros(8, 3, dtype=torch.long)
    expected = vineppo.compute_advantages(rewards, *ragged(others, steps, mask), mask)
    assert torch.equal(rloo.compute_advantages(rewards, 8, mask), expected)


@pytest.mark.parametrize("seed", range(5))
def test_family_in_one_line(seed):
    """VinePPO with one step, valued by the rest of the group, is RLOO; GRPO is RLOO's advantage,
    scaled by (G - 1) / G and divided by the group's spread."""
    rewards = torch.rand(32, generator=torch.Generator().manual_seed(seed))
    groups, mask = rewards.view(4, 8), torch.ones(32, 1)
    others = ((groups.sum(dim=1, keepdim=True) - groups) / 7).view(-1, 1)
    steps = torch.zeros(32, 1, dtype=torch.long)
    leave_one_out = rloo.compute_advantages(rewards, 8, mask)
    torch.testing.assert_close(
        leave_one_out, vineppo.compute_advantages(rewards, *ragged(others, steps, mask), mask)
    )
    spread = groups.std(dim=1, correction=0, keepdim=True).expand_as(groups).reshape(-1, 1)
    expected = leave_one_out * 7 / 8 / spread
    torch.testing.assert_close(grpo.compute_advantages(rewards, 8, mask), expected)


# ---- PPO's critic --------------------------------------------------------------------------------


def test_gae_by_hand():
    """gamma .5, lambda .5, values .4 .2 .6, reward 1 at the end. Deltas: .5 * .2 - .4 = -.3,
    .5 * .6 - .2 = .1, 1 - .6 = .4; then .4, .1 + .25 * .4 = .2, -.3 + .25 * .2 = -.25."""
    values = torch.tensor([[0.4, 0.2, 0.6, 9.0], [0.3, 9.0, 9.0, 9.0]])
    mask = torch.tensor([[1.0, 1, 1, 0], [1, 0, 0, 0]])  # the second is a response of one token
    advantages = ppo.compute_advantages(torch.tensor([1.0, 1.0]), values * mask, mask, 0.5, 0.5)
    expected = torch.tensor([[-0.25, 0.2, 0.4, 0.0], [0.7, 0, 0, 0]])
    torch.testing.assert_close(advantages, expected)


@pytest.mark.parametrize("seed", range(5))
def test_gae_is_the_double_sum(seed):
    """Eq. 15 and 16 written out, at gamma .9 and lambda .95, for rows of unlike lengths."""
    rewards, _, _, mask, _ = random_steps(seed)
    values = torch.rand(mask.shape, generator=torch.Generator().manual_seed(seed)) * mask
    advantages = ppo.compute_advantages(rewards, values, mask, 0.9, 0.95)
    for row in range(len(rewards)):
        length = int(mask[row].sum())
        rs = [0.0] * (length - 1) + [rewards[row].item()]
        vs = [*values[row, :length].tolist(), 0.0]
        for t in range(length):
            expected = sum(
                (0.9 * 0.95) ** (u - t) * (rs[u] + 0.9 * vs[u + 1] - vs[u])
                for u in range(t, length)
            )
            assert advantages[row, t].item() == pytest.approx(expected, abs=1e-5)
        assert (advantages[row, length:] == 0).all()


@pytest.mark.parametrize("seed", range(5))
def test_gae_without_discounts_is_reward_minus_value(seed):
    rewards, _, _, mask, _ = random_steps(seed)
    values = torch.rand(mask.shape, generator=torch.Generator().manual_seed(seed)) * mask
    advantages = ppo.compute_advantages(rewards, values, mask, 1.0, 1.0)
    torch.testing.assert_close(advantages, (rewards[:, None] - values) * mask)


@pytest.mark.parametrize(
    ("new", "old", "target", "loss", "gradient"),
    [
        (0.6, 0.5, 1.0, 0.5 * 0.4**2, -0.4),  # inside the clip: the plain error
        (0.9, 0.5, 1.0, 0.5 * 0.3**2, 0.0),  # it rose past .7, towards the target: no more of it
        (0.9, 0.5, 0.0, 0.5 * 0.9**2, 0.9),  # it rose away from the target: pulled back
        (0.1, 0.5, 0.0, 0.5 * 0.3**2, 0.0),  # it fell past .3, towards the target
        (0.1, 0.5, 1.0, 0.5 * 0.9**2, -0.9),  # it fell away from the target
    ],
)
def test_value_clip(new, old, target, loss, gradient):
    value = torch.tensor([[new, 5.0]], requires_grad=True)  # the second is padding
    found, sums = ppo.compute_value_loss(
        value,
        torch.tensor([[old, 0.0]]),
        torch.tensor([[target, 0.0]]),
        torch.tensor([[1.0, 0.0]]),
        num_tokens=2,
        clip_coef_value=0.2,
    )
    found.backward()
    assert found.item() == pytest.approx(loss / 2)  # of two tokens in the minibatch
    assert value.grad[0].tolist() == pytest.approx([gradient / 2, 0.0])
    assert sums["loss/value"].item() == pytest.approx(loss)
    assert sums["value/clip_fraction"] == float(gradient == 0.0)


def test_values_are_read_before_their_tokens(model):
    """The critic's head on the hidden state one position before each token, padded or alone; and a
    token never changes its own value."""
    hidden_size = model.get_output_embeddings().in_features
    old_head, head = model.get_output_embeddings(), torch.nn.Linear(hidden_size, 1)
    model.set_output_embeddings(head)
    rows = [([5, 6, 7], [8, 9, 0]), ([5], [0])]
    input_ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(p + r) for p, r in rows], True)
    prompt_lens, mask = torch.tensor([3, 1]), torch.tensor([[1.0, 1, 1], [1, 0, 0]])
    with torch.no_grad():
        values = ppo.compute_values(model, input_ids, prompt_lens, mask)
        for row, (prompt, response) in enumerate(rows):
            hidden = model(torch.tensor([prompt + response]), output_hidden_states=True)
            expected = head(hidden.hidden_states[-1][0, len(prompt) - 1 : -1])[:, 0]
            torch.testing.assert_close(values[row, : len(response)], expected)
        assert (values[1, 1:] == 0).all()
        input_ids[0, 4] = 1
        changed = ppo.compute_values(model, input_ids, prompt_lens, mask)
    assert torch.equal(changed[0, :2], values[0, :2]) and changed[0, 2] != values[0, 2]
    model.set_output_embeddings(old_head)


# ---- RestEM and DPO-Positive ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("accuracies", "chosen"),
    [
        ([0.1], 0),  # nothing was trained
        ([0.1, 0.2, 0.3, 0.25], 2),
        ([0.1, 0.2, 0.2, 0.9], 1),  # a tie ends the walk
        ([0.3, 0.2, 0.9], 0),  # step 0 is a candidate: the SFT checkpoint itself
        ([0.1, 0.2, 0.15, 0.9], 1),  # what comes after the first fall is not looked at
        ([0.1, 0.2, 0.3], 2),
    ],
)
def test_the_walk(accuracies, chosen):
    assert restem.select_checkpoint(accuracies) == chosen


def test_sft_loss_weighs_responses_not_tokens():
    logprobs = torch.tensor([[-1.0, -3.0, -2.0], [-4.0, 0.0, 0.0]])
    mask = torch.tensor([[1.0, 1, 1], [1, 0, 0]])
    assert restem.compute_sft_loss(logprobs, mask, num_responses=2).item() == 3.0  # (2 + 4) / 2


@pytest.mark.parametrize("seed", range(5))
def test_dpo_positive_against_numpy(seed):
    """Both sides of the max: right responses that became likelier and rarer than the reference."""
    rng = np.random.default_rng(seed)
    new, ref = rng.normal(-30, 2, (2, 2, 16))
    beta, penalty = 0.1, 5.0
    pi_w, pi_l, ref_w, ref_l = new[0], new[1], ref[0], ref[1]
    z = (pi_w - pi_l) - (ref_w - ref_l) - penalty * np.maximum(0, ref_w - pi_w)
    expected = np.log1p(np.exp(-beta * z))
    losses, logs = dpo_pos.compute_dpo_positive_loss(
        torch.tensor(new), torch.tensor(ref), beta, penalty
    )
    np.testing.assert_allclose(losses.numpy(), expected)
    assert 0 < logs["dpo/penalised"].mean() < 1
    np.testing.assert_allclose(logs["dpo/chosen_logratio"].numpy(), pi_w - ref_w)


def test_dpo_positive_by_hand_and_its_gradient():
    """Likelier right response: plain DPO, z = 1 + 2 = 3. Rarer one, the same margin: z = 3 - 50."""

    def loss_of(chosen, rejected, penalty=50.0):
        logprobs = torch.tensor([[chosen], [rejected]], requires_grad=True)
        losses, _ = dpo_pos.compute_dpo_positive_loss(logprobs, torch.zeros(2, 1), 0.1, penalty)
        losses.sum().backward()
        return losses.item(), logprobs.grad.flatten().tolist()

    loss, gradient = loss_of(1.0, -2.0)
    assert loss == pytest.approx(math.log1p(math.exp(-0.3))) == loss_of(1.0, -2.0, 0.0)[0]
    weight = 0.1 / (1 + math.exp(0.3))  # beta * sigmoid(-beta z)
    assert gradient == pytest.approx([-weight, weight])
    loss, gradient = loss_of(-1.0, -4.0)
    assert loss == pytest.approx(math.log1p(math.exp(4.7)), rel=1e-6)
    weight = 0.1 / (1 + math.exp(-4.7))
    assert gradient == pytest.approx([-51 * weight, weight])  # 1 + penalty: the right one first
    assert loss_of(-1.0, -4.0, 0.0)[0] == pytest.approx(loss_of(1.0, -2.0)[0])  # what DPO allows


def test_dpo_positive_starts_without_a_penalty():
    """The policy is the reference: a pair's loss is log 2, both gradients are equally large."""
    logprobs = torch.tensor([[-30.0], [-40.0]], requires_grad=True)
    losses, logs = dpo_pos.compute_dpo_positive_loss(logprobs, logprobs.detach(), 0.1, 50.0)
    losses.sum().backward()
    assert losses.item() == pytest.approx(math.log(2)) and logs["dpo/penalised"] == 0
    assert logprobs.grad.flatten().tolist() == pytest.approx([-0.05, 0.05])


def test_pairs():
    rewards = [1.0, 0.0, 1.0, 0.0, 0.0]
    pairs = dpo_pos.make_pairs(rewards, 64, seed=1)
    assert sorted(pairs) == [(0, 1), (0, 3), (0, 4), (2, 1), (2, 3), (2, 4)]
    some = dpo_pos.make_pairs(rewards, 4, seed=1)
    assert len(set(some)) == 4 and set(some) < set(pairs)
    assert dpo_pos.make_pairs(rewards, 4, seed=1) == some != dpo_pos.make_pairs(rewards, 4, seed=2)
    assert dpo_pos.make_pairs([1.0, 1.0], 64, 1) == dpo_pos.make_pairs([0.0, 0.0], 64, 1) == []


# ---- batches in which nothing, or everything, is right -------------------------------------------


@pytest.mark.parametrize("reward", [0.0, 1.0])
def test_batches_of_equal_rewards_give_zero_and_no_nan(reward):
    """VinePPO (all rollouts alike), GRPO and RLOO give 0; PPO still gives R - V."""
    rewards, mask = torch.full((4,), reward), torch.tensor([[1.0, 1], [1, 0], [1, 1], [1, 0]])
    steps, values = torch.zeros(4, 2, dtype=torch.long), torch.full((4, 1), reward)
    for advantages in (
        vineppo.compute_advantages(rewards, *ragged(values, steps, mask), mask),
        grpo.compute_advantages(rewards, 2, mask),
        rloo.compute_advantages(rewards, 2, mask),
    ):
        assert (advantages == 0).all() and (vineppo.whiten(advantages, mask) == 0).all()
    critic_values = torch.tensor([[0.5, 0.25], [0.5, 0], [0.5, 0.25], [0.5, 0]])
    advantages = ppo.compute_advantages(rewards, critic_values, mask, 1.0, 1.0)
    torch.testing.assert_close(advantages, (reward - critic_values) * mask)
    assert ppo.whiten(advantages, mask).isfinite().all()


def test_a_single_response_of_a_single_token():
    mask = torch.ones(1, 1)
    one = ppo.compute_advantages(torch.tensor([1.0]), torch.tensor([[0.25]]), mask, 0.9, 0.95)
    assert one.tolist() == [[0.75]] and ppo.whiten(one, mask).tolist() == [[0.0]]
    assert vineppo.compute_advantages(torch.tensor([0.0]), [[0.25]], [[1]], mask).item() == -0.25


@pytest.mark.slow
def test_memory_does_not_grow_with_vocabulary_times_length():
    few, many, at_once = map(int, call("-m", "tests.head_memory").stdout.split())
    logits = 20_000 * 1_024 * 4 // 1_000_000  # MB of those of 1,024 tokens, in float32
    assert many - few < logits  # 3,072 tokens more
    assert at_once - many > 2 * logits  # 3,072 more than a chunk: the measure can tell
