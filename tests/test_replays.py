"""Recorded episodes replayed: however they are cut and dealt out, the gradients are the same; and
what the scripts do when numbers break."""

import functools
import json
import math

import pytest
import torch

from tests.conftest import call, read_jsonl, timeless


@pytest.fixture(scope="module")
def replayed(recorded):
    """{name: what the call with these options wrote}, each called once."""
    folder, arguments = recorded

    @functools.cache
    def replay(name: str, ranks: int, *options: str):
        call("-m", "tests.replay", *arguments, "--name", name, *options, ranks=ranks)
        return folder / name

    return replay


def check_same(one, other, script):
    steps, whole = torch.load(one / script), torch.load(other / script)
    assert len(steps) == len(whole) > 2
    for ours, theirs in zip(steps, whole, strict=True):  # each from the same weights
        tolerance = 2e-5
        assert ours["norm"] == pytest.approx(theirs["norm"], rel=tolerance) and ours["norm"] > 0
        for weight, gradient in ours["grads"].items():  # ZeRO 2 keeps them elsewhere
            difference = (gradient - theirs["grads"][weight]).norm()
            assert difference <= tolerance * theirs["grads"][weight].norm(), weight
        for weight, value in ours["weights"].items():
            difference = (value - theirs["weights"][weight]).abs()
            assert difference.max() < 1e-3, weight  # the learning rate
            # Adam's first step has one size for all gradients, also where they are rounding alone
            gradient = theirs["grads"].get(weight, torch.ones(1)).abs()
            is_rounding = gradient < 1e-4 * gradient.square().mean().sqrt()
            assert difference.masked_fill(is_rounding, 0).max() < 1e-4, weight
    lines = [timeless(folder / f"{script}.run/metrics.jsonl") for folder in (one, other)]
    for found, expected in zip(*lines, strict=True):
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            if key not in ("tokens/padding", "policy/sampler_gap"):
                # a share of clipped tokens jumps where one of them is at the border
                absolute = 5e-3 if key.endswith("clip_fraction") else 1e-5
                assert found[key] == pytest.approx(value, rel=1e-3, abs=absolute), key


SCRIPTS = ["vineppo", "ppo", "grpo", "rloo", "restem", "dpo_pos"]


@pytest.mark.parametrize("script", SCRIPTS)
def test_two_ranks_make_the_gradients_of_one(recorded, replayed, script):
    """Ragged episodes, each in a pass of its own: one rank has a pass more than the other."""
    found = replayed("two_ranks", 2, "--micro-batch-tokens", "60")
    check_same(found, recorded[0] / "recorded", script)


@pytest.mark.soak  # the test above has two ranks, without ZeRO 2
@pytest.mark.parametrize("script", ["vineppo", "ppo"])
@pytest.mark.parametrize(
    ("name", "ranks", "options"),
    [
        ("small", 1, ["--micro-batch-tokens", "200"]),
        ("two_ranks_zero_2", 2, ["--micro-batch-tokens", "250", "--zero-stage", "2"]),
    ],
)
def test_gradients_do_not_depend_on_micro_batches_or_zero(
    recorded, replayed, script, name, ranks, options
):
    found = replayed(name, ranks, *options, "--scripts", "vineppo", "ppo")
    check_same(found, recorded[0] / "recorded", script)


def test_recorded_episodes_are_ragged_and_some_are_cut(recorded):
    for script in ("vineppo", "ppo", "grpo", "rloo"):
        (line,) = read_jsonl(recorded[0] / f"recorded/{script}.run/metrics.jsonl")
        assert 0 < line["rollout/unfinished"] < 1


@pytest.fixture(scope="module")
def faults(recorded):
    """{(script, what breaks): what the run did}."""
    folder, arguments = recorded
    lines = call("-m", "tests.faults", *arguments).stdout.splitlines()
    found = [json.loads(line) for line in lines if line.startswith('{"case"')]
    return folder / "faults", {tuple(one["case"]): one for one in found}


@pytest.mark.parametrize("script", ["vineppo", "ppo", "grpo", "rloo"])
def test_an_exploded_minibatch_is_skipped_and_counted(recorded, faults, script):
    """The second minibatch's ratio is made to look like an explosion: five steps, not six."""
    found = faults[1][script, "ratio"]
    whole = [step["norm"] for step in torch.load(recorded[0] / f"recorded/{script}")]
    assert found["error"] == "" and found["metrics"][0]["policy/skipped"] == pytest.approx(1 / 6)
    critics = 6 if script == "ppo" else 0  # each of its steps is made
    assert len(found["norms"]) == 5 + critics
    assert found["norms"][0] == whole[0] != found["norms"][1]
    # the policy's next step has nothing of the skipped gradient, which was made 100 times as large
    policy = [found["norms"][i] for i in ((0, 3, 5, 7, 9) if critics else range(5))]
    assert policy[1] < 5 * max(whole)
    mean = found["metrics"][0]["policy/grad_norm"]  # of the steps that were made
    assert math.isfinite(mean) and mean == pytest.approx(sum(policy) / 5)


@pytest.mark.parametrize(
    ("script", "fault", "iteration", "number"),
    [
        ("vineppo", "loss", 1, "loss/policy is "),
        ("vineppo", "gradient", 1, "policy/grad_norm is nan"),
        ("vineppo", "logprob", 1, "old_logprobs is not finite"),
        ("vineppo", "reference", 1, "ref_logprobs is not finite"),
        ("ppo", "gradient", 1, "policy/grad_norm is nan"),
        ("grpo", "gradient", 1, "policy/grad_norm is nan"),
        ("rloo", "gradient", 1, "policy/grad_norm is nan"),
        ("ppo", "critic", 1, "value/grad_norm is nan"),
        ("restem", "gradient", 1, "policy/grad_norm is nan"),
        ("dpo_pos", "gradient", 2, "policy/grad_norm is nan"),
        ("sft", "gradient", 2, "policy/grad_norm is nan"),
        ("restem", "loss", 1, "loss/sft is "),
        ("dpo_pos", "loss", 2, "loss/dpo is "),
        ("sft", "loss", 2, "loss/sft is "),
    ],
)
def test_broken_numbers_stop_the_run(faults, script, fault, iteration, number):
    folder, outcomes = faults
    found = outcomes[script, fault]
    assert f"iteration {iteration}: " in found["error"] and number in found["error"]
    (name,) = found["dumped"]
    dumped = torch.load(folder / f"{script}-{fault}" / name)
    assert name in found["error"] and len(dumped["input_ids"]) > 1
    assert len(found["metrics"]) == iteration - 1


def test_a_stale_engine_trains_no_model(faults):
    found = faults[1]["vineppo", "stale"]
    assert "policy/sampler_gap is 0.01, above 0.0001: vLLM's weights" in found["error"]
    assert found["norms"] == []


@pytest.mark.parametrize(
    ("script", "fault"),
    [("vineppo", "stale at length"), ("vineppo", "stale before it"), ("restem", "stale at length")],
)
def test_an_engine_that_errs_on_some_lengths_trains_no_model(faults, script, fault):
    found = faults[1][script, fault]
    assert "above 0.0001: vLLM's weights" in found["error"] and found["norms"] == []


def test_restem_with_nothing_right_stays_at_the_sft_checkpoint(faults):
    found = faults[1]["restem", "nothing right"]
    (line,) = found["metrics"]
    assert line["walk/kept"] == line["walk/updates"] == line["policy/weight_distance"] == 0
    assert found["error"] == "" and found["norms"] == []


def test_restem_forgets_its_engine_before_it_makes_another(faults):
    found = faults[1]["restem", "twice"]
    assert found["error"] == "" and len(found["metrics"]) == 2
    for line in found["metrics"]:  # the walk rejects its second checkpoint, and that one's accuracy
        assert line["eval/pass@1"] == 0.5 and line["walk/chosen_update"] == 0
        assert line["walk/evaluations"] == 2 and line["walk/updates"] > 0
    # before the loop, then in each of two iterations: else a GPU would have to hold both
    assert found["alive"] == [0, 0, 0]


def test_dpo_without_a_pair_says_so(faults):
    found = faults[1]["dpo_pos", "nothing right"]
    assert found["error"].startswith("no prompt of 5 has right and wrong responses: raise")
