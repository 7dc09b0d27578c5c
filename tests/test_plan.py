"""benchmarks/plan.py: counts by hand, advice that is true when followed, one measured update."""

import glob
import json
import os
import re

import pytest

import vineppo
from benchmarks import plan, plan_check
from common import UsageError
from experiments import vineppo_cheap
from tests.conftest import ROOT, call

SMALL = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
SMALL |= {"intermediate_size": 96, "num_key_value_heads": 2, "vocab_size": 500}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    from transformers import LlamaConfig

    folder = str(tmp_path_factory.mktemp("model"))
    LlamaConfig(**SMALL, tie_word_embeddings=False).save_pretrained(folder)
    return folder


def setting(model, **changes) -> plan.Setting:
    made = plan.Setting(model, "bfloat16", 0, 4, 512, 128, 64, 0.5, critic=False)
    return made._replace(**changes)


# ---- parameters ----------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [True, False])
def test_parameters_are_those_of_a_real_model(tied, tmp_path):
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**SMALL, tie_word_embeddings=tied)
    config.save_pretrained(tmp_path)
    real = [p.numel() for p in LlamaForCausalLM(config).parameters()]
    assert plan.count(str(tmp_path)) == real
    # the critic's head is one row and a bias; with tied weights the embeddings stay
    head = 0 if tied else 500 * 64
    assert sum(plan.count(str(tmp_path), critic=True)) == sum(real) - head + 64 + 1


@pytest.mark.parametrize(
    "name, vocabulary, hidden, layers, heads, intermediate",
    [("rho1b", 32_000, 2048, 22, 4 / 32, 5632), ("deepseekmath7b", 102_400, 4096, 30, 1, 11_008)],
)
def test_the_paper_s_models(name, vocabulary, hidden, layers, heads, intermediate):
    attention = 2 * hidden**2 + 2 * hidden * int(hidden * heads)
    layer = attention + 3 * hidden * intermediate + 2 * hidden
    by_hand = 2 * vocabulary * hidden + layers * layer + hidden
    assert sum(plan.count(f"{ROOT}/benchmarks/models/{name}")) == by_hand


# ---- memory --------------------------------------------------------------------------------------


def test_shares_count_parameters_whole():
    # 12 elements in two parts of 6: the middle one lies in both
    assert plan.shares([3, 5, 4], 2) == [8, 9]
    assert plan.shares([3, 5, 4], 1) == [12]
    assert sum(plan.shares([1], 4)) == 1  # parts that hold nothing but padding


def test_bytes_of_an_engine_by_hand(model):
    total, largest = sum(plan.count(model)), 500 * 64

    def bytes_of(**changes):
        return plan.engine(setting(model, **changes), critic=False)

    # ZeRO 0 in bfloat16: 2 + 4 + 8 bytes a parameter on every rank, 2 for a gradient; the step has
    # it in float32 too, and the square roots of the second moments
    state = {"weights": 2 * total, "float32 weights": 4 * total, "Adam state": 8 * total}
    assert bytes_of() == {**state, "gradients": 2 * total, "step": (2 + 4 + 4) * total}
    # in float32 the weights are their own master copy
    state = {"weights": 4 * total, "float32 weights": 0, "Adam state": 8 * total}
    assert bytes_of(dtype="float32") == {**state, "gradients": 4 * total, "step": (4 + 4) * total}
    # ZeRO 2 on 4 ranks: all of the weights, a quarter of the rest
    own = total / 4
    found = bytes_of(zero_stage=2)
    assert found["weights"] == pytest.approx(2 * total, rel=1e-3)
    assert found["float32 weights"] == pytest.approx(4 * own, rel=1e-3)
    assert found["Adam state"] == pytest.approx(8 * own, rel=1e-3)
    assert 2 * own <= found["gradients"] <= 2 * (own + 2 * largest)


def test_the_reference_model_is_on_a_gpu_in_its_own_phase_only(model):
    for device, phases in ("cuda", ["reference"]), ("cpu", None):
        memory = plan.plan_memory(setting(model, device=device), gpu_memory=1)
        having = [name for name, parts in memory.items() if parts.get("reference weights")]
        assert having == (phases or list(memory))
    assert "vLLM weights" not in memory["reference"] and memory["reference"]["log-probs"] > 0
    assert memory["reference"]["reference weights"] * 2**30 == 2 * sum(plan.count(model))


def test_activations_grow_with_tokens_and_not_with_ranks(model):
    one, two = (plan.trace(setting(model, micro_batch_tokens=n), False) for n in (2048, 4096))
    assert two["kept"] == pytest.approx(2 * one["kept"], rel=0.02)
    assert plan.trace(setting(model, micro_batch_tokens=2048, ranks=8), False) == one
    assert one["pass"] < one["kept"] < one["peak"]
    # a row longer than the budget stands alone
    assert plan.trace(setting(model, micro_batch_tokens=16), False) == plan.trace(
        setting(model, micro_batch_tokens=128), False
    )


@pytest.mark.soak
def test_one_setting_measured(tmp_path):
    """ZeRO 2, untied, with a critic, rank 0 of 4: the most that plan_check has."""
    made = plan_check.make_setting(str(tmp_path), *plan_check.SETTINGS[3][1:])
    done = call("-m", "benchmarks.plan_check", "--setting", json.dumps(made))
    measured, bucket = int(done.stdout.split("peak ")[-1]), 4 * plan.BUCKET
    assert plan_check.planned(made) == pytest.approx(measured, rel=0.1)
    assert plan_check.planned(made) - bucket == pytest.approx(measured - bucket, rel=0.1)


# ---- what is said --------------------------------------------------------------------------------


def test_a_recipe_s_flags_are_read():
    path = f"{ROOT}/recipes/deepseekmath7b_gsm8k.sh"
    s, script = plan.read_run(plan.Args(path, "vineppo", flags="--k 3 --micro-batch-tokens 3000"))
    assert s[1:7] == ("bfloat16", 2, 8, 3000, 2500, 1024) and s.sampler_share == 0.5
    assert script.k == 3 and script.max_steps_valued == 25 and script.num_iterations == 650
    assert os.path.basename(s.model) == "deepseekmath7b" and not s.critic


@pytest.mark.slow
@pytest.mark.parametrize("method", ["vineppo", "ppo", "grpo", "rloo"])
@pytest.mark.parametrize("recipe", sorted(glob.glob("recipes/*_*.sh", root_dir=ROOT)))
def test_every_recipe_fits_its_gpus_with_room_to_spare(recipe, method, capsys):
    args = plan.Args(f"{ROOT}/{recipe}", method)
    s, script = plan.read_run(args)
    assert plan.needed(s, args) <= 0.95 * 80
    plan.main(args)
    said = capsys.readouterr().out
    size = {"rho1b": 17.6, "deepseekmath7b": 110.6}[os.path.basename(s.model)]
    both = {"rho1b": 34.2, "deepseekmath7b": 214.4}[os.path.basename(s.model)]  # no second head
    checkpoint, disk = map(int, re.search(r"has (\d+) GB.*: (\d+) GB of disk", said).groups())
    assert checkpoint == pytest.approx(both if s.critic else size, abs=1)
    assert disk == pytest.approx(3.25 * checkpoint, abs=3) and script.keep_checkpoints == 2
    assert re.search(r"iterations: \d+\.\d hours", said)


@pytest.mark.parametrize(
    "args, message",
    [
        (plan.Args("recipes/none.sh", "ppo"), "recipes/none.sh: no such recipe"),
        (plan.Args("restem.py"), "'restem': plans are made for vineppo, ppo, grpo, rloo only"),
        (plan.Args("ppo.py", model="nowhere"), "--model nowhere: no config.json there"),
        (plan.Args("ppo.py", flags="--k"), None),
        (plan.Args("ppo.py", flags="--minibatch-size 7"), "--minibatch-size 7: must divide"),
    ],
)
def test_mistakes_are_named(args, message):
    with pytest.raises(UsageError if message else SystemExit, match=message):
        plan.read_run(args)


@pytest.mark.slow
def test_what_does_not_fit_names_flags_that_make_it_fit(model, capsys):
    tight = dict(run="vineppo.py", model=model, gpu_memory=0.09, overhead=0, sampler_overhead=0)
    lengths = "--max-model-len 128 --max-response-len 64 --dtype bfloat16"

    def said(flags: str, **changes) -> str:
        plan.main(plan.Args(**{**tight, **changes}, flags=f"{lengths} {flags}"))
        return capsys.readouterr().out

    found = said("--micro-batch-tokens 16384")
    assert "does not fit a GPU of 0.09 GiB" in found
    advice = [line for line in found.splitlines() if line.startswith("  fits with ")]
    assert advice[0].startswith("  fits with --micro-batch-tokens")
    for line in advice:
        flags = line.removeprefix("  fits with ").split(":")[0]
        assert "does not fit" not in said(f"--micro-batch-tokens 16384 {flags}")
    # vLLM's share holds no sequence: a larger one does
    assert "fits with --gpu-memory-utilization" in said("--gpu-memory-utilization 0.001")
    assert "nothing that was tried fits" in said("", gpu_memory=1e-4)


# ---- tokens --------------------------------------------------------------------------------------


def test_tokens_by_hand():
    script = vineppo_cheap.Args(num_prompts=1, group_size=1, k=2)
    # two steps: from the prompt all 10 tokens are left, behind the first step 5; twice
    found = plan.plan_tokens(script, prompt_len=4, response_len=10, steps=2)
    assert found == {"sample": 10, "rollouts": 30, "pass": 14}
    script.max_steps_valued = 1
    assert plan.plan_tokens(script, 4, 10, 2)["rollouts"] == 20
    script.max_steps_valued, script.num_prompts, script.group_size = 2, 3, 5
    # four steps, two valued: from a prompt 10, behind the first step 7.5
    assert plan.plan_tokens(script, 4, 10, 4)["rollouts"] == 2 * (3 * 10 + 15 * 7.5)


def test_tokens_of_the_embedded_task_are_those_of_its_runs():
    # docs/results.md: VinePPO 3,033 thousand in 20 iterations, GRPO 86
    found = plan.plan_tokens(vineppo.Args(), *plan.TYPICAL["chain"])
    assert found["sample"] == pytest.approx(86_000 / 20, rel=0.1)
    assert found["rollouts"] == pytest.approx((3_033_000 - 86_000) / 20, rel=0.1)
