"""Exact values against chains that are played out; the comparison's readings of a run."""

import json
import os
import random
from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaForCausalLM

from analysis import compare, gradient
from analysis.exact import OPS, exact_values, read_digits, read_prompt
from common import UsageError, data, steps
from tasks import chain


@pytest.fixture(scope="module")
def table():
    """P(result | operation, digit, operand) of a policy that is right with probability 0.7."""
    probabilities = torch.rand(2, 10, 10, 10, generator=torch.Generator().manual_seed(0))
    probabilities *= 0.3 / probabilities.sum(dim=-1, keepdim=True)
    for i, op in enumerate(OPS):
        for digit in range(10):
            for operand in range(10):
                right = chain.apply_operation(digit, op, operand)
                probabilities[i, digit, operand, right] += 0.7
    return probabilities


@pytest.mark.parametrize("step", [0, 3, 7])
def test_exact_values_are_the_rate_at_which_chains_come_out_right(table, step):
    prompt = data.load_problems("chain", "test")[0].prompt
    answer = int(data.load_problems("chain", "test")[0].answer)
    _, operations = read_prompt(prompt)
    values = exact_values(prompt, table)
    assert values.shape == (9, 10)
    rng = random.Random(step)
    for digit in (0, 4, 7):
        right, plays = 0, 4000
        for _ in range(plays):
            now = digit
            for op, operand in operations[step:]:
                weights = table[OPS.index(op), now, operand].tolist()
                now = rng.choices(range(10), weights)[0]
            right += now == answer
        expected = values[step, digit].item()
        assert abs(right / plays - expected) < 4 * (expected * (1 - expected) / plays) ** 0.5 + 1e-3


def test_exact_values_of_a_perfect_policy(table):
    problem = data.load_problems("chain", "test")[0]
    values = exact_values(problem.prompt, (table > 0.6).float())
    assert set(values.flatten().tolist()) == {0.0, 1.0} and (values.sum(dim=1) == 1).all()
    assert values[0, int(problem.prompt[0])] == 1 and values[8, int(problem.answer)] == 1


def test_digits_of_demonstrations_and_of_what_is_no_chain():
    tokenizer = chain.make_tokenizer()
    for problem in data.load_problems("chain", "sft")[:50]:
        ids = tokenizer(problem.solution).input_ids
        ends = steps.split_steps(ids, tokenizer, "line")
        texts = steps.step_texts(ids, ends, tokenizer)
        digits = read_digits(problem.prompt, texts)
        assert digits[0] == int(problem.prompt[0]) and len(digits) == 9
        assert str(digits[-1]) == problem.solution[-1]
        assert read_digits(problem.prompt, texts[1:]) is None  # a line is missing
        texts[2] = texts[2].replace("+", "-") if "+" in texts[2] else texts[2].replace("-", "+")
        assert read_digits(problem.prompt, texts) is None  # another operation


def write_run(folder, method, args, lines):
    path = folder / f"{method}-lr0.1-seed1"
    path.mkdir()
    (path / "args.json").write_text(json.dumps(args))
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def test_a_curve_counts_steps_seconds_and_tokens(tmp_path):
    args = {"num_prompts": 8, "group_size": 8, "minibatch_size": 16, "update_epochs": 2}
    line = {"rollout/reward": 0.5, "time/iteration": 10.0, "time/evaluate": 4.0, "time/save": 1.0}
    line |= {"tokens/sample": 100, "tokens/rollouts": 900}
    lines = [
        {"iteration": 1, **line},
        {"iteration": 2, **line, "rollout/reward": 0.7, "eval/pass@1": 0.4},
    ]
    start, point = compare.read_curve(write_run(tmp_path, "vineppo", args, lines), 0.1)
    assert start["pass@1"] == 0.1 and start["steps"] == start["seconds"] == 0
    assert point["iteration"] == 2 and point["steps"] == 16 and point["seconds"] == 10
    assert point["tokens"] == 2000
    assert start["reward"] == 0.5 and "reward" not in point  # no samples of the last policy

    walk = {"walk/updates": 25, "walk/evaluations": 3, "rollout/response_length": 60.0}
    lines = [{"iteration": i, **line, **walk, "eval/pass@1": 0.3} for i in (1, 2)]
    args |= {"num_prompts": 40, "update_epochs": 8, "eval_problems": 100, "eval_rounds": 4}
    _, point, _ = compare.read_curve(write_run(tmp_path, "restem", args, lines), 0.1)
    assert point["iteration"] == 5 and point["steps"] == 25 and point["reward"] == 0.5
    assert point["seconds"] == 9  # the walk needs its evaluations
    assert point["tokens"] == 1000 + 3 * 100 * 4 * 60

    lines = [{"iteration": i, "time/iteration": 1.0} for i in (1, 2)]
    lines[0] |= {"rollout/reward": 0.2, "tokens/sample": 7}
    lines[1] |= {"eval/pass@1": 0.2}
    args |= {"num_prompts": 20, "group_size": 64}
    _, point = compare.read_curve(write_run(tmp_path, "dpo_pos", args, lines), 0.1)
    assert point["iteration"] == 20 and point["steps"] == 2 and point["tokens"] == 7


def test_reach_and_spread():
    curve = [{"pass@1": p, "steps": s} for p, s in ((0.1, 0), (0.3, 10), (0.2, 20), (0.7, 30))]
    assert compare.reach(curve, 0.2, "steps") == pytest.approx(5)
    assert compare.reach(curve, 0.6, "steps") == pytest.approx(28)
    assert compare.reach(curve, 0.05, "steps") == compare.reach(curve, 0.1, "steps") == 0
    dip = [{"pass@1": p, "steps": s} for p, s in ((0.1, 0), (0.05, 10), (0.2, 20))]
    assert compare.reach(dip, 0.1, "steps") == 0
    assert compare.reach(curve, 0.8, "steps") == float("inf")
    assert compare.spread([0.5, 0.7, 0.6]) == "0.600 (0.500 to 0.700)"
    assert compare.spread([10.0, float("inf")], ".0f") == "10 (10 to 10), 1 of 2 never"
    assert compare.spread([float("inf")] * 2) == "never"


def test_results_are_read_at_the_equals_signs():
    """On demonstrations: each probability is that of the token behind an `=`, which is the digit in
    which the next step starts."""
    tokenizer = chain.make_tokenizer()
    torch.manual_seed(0)
    model = LlamaForCausalLM(chain.make_model_config(tokenizer)).eval()
    episodes = []
    for problem in data.load_problems("chain", "sft")[:3]:
        prompt_ids, ids = tokenizer([problem.prompt, problem.solution]).input_ids
        ends = steps.split_steps(ids, tokenizer, "line")
        digits = read_digits(problem.prompt, steps.step_texts(ids, ends, tokenizer))
        episodes.append(gradient.Episode(problem, prompt_ids, ids, 0.0, ends, digits))
    ((lines, results),) = gradient.result_probabilities(model, tokenizer, episodes, 0.6)
    assert len(lines) == 3 * 8 and results.shape == (24, 10)
    for (episode, line), result in zip(lines, results, strict=True):
        sequence = torch.tensor([episode.prompt_ids + episode.ids])
        tokens = tokenizer.convert_ids_to_tokens(sequence[0].tolist())
        place = [i for i, token in enumerate(tokens) if token == "="][line + 1]  # one in the prompt
        assert tokens[place + 1] == str(episode.digits[line + 1])
        logits = model(sequence).logits[0, place] / 0.6
        ids = tokenizer.convert_tokens_to_ids(list("0123456789"))
        torch.testing.assert_close(result, torch.softmax(logits, dim=-1)[ids])


def test_results_keep_what_is_written_around_them(tmp_path):
    points = [{"pass@1": p, "steps": s, "seconds": s, "tokens": s} for p, s in ((0.1, 0), (0.7, 8))]
    curve = [{**point, "iteration": i} for i, point in enumerate(points)]
    curves = {method: [curve, curve] for method in ("vineppo", "ppo")}
    scores = {method: {0.1: [0.7, 0.7], 0.2: [0.5, 0.6]} for method in curves}
    best, test = {m: 0.1 for m in curves}, {m: [0.6, 0.8] for m in curves}
    arguments = (curves, scores, best, test, 0.1, (1, 2), 2)
    compare.write_results(str(tmp_path), *arguments)
    page = (tmp_path / "results.md").read_text()
    assert (
        "| VinePPO | 0.1 | 0.700 (0.600 to 0.800) | 0.700 (0.700 to 0.700) | 8 (8 to 8) |" in page
    )
    assert "| PPO | 1.00 | 1.00 |" in page and "| PPO | 0.700 (0.700 to 0.700) | 0.550" in page
    (tmp_path / "results.md").write_text(
        page.replace("# The methods, compared", "# Mine") + "end\n"
    )
    compare.write_results(str(tmp_path), *arguments)
    page = (tmp_path / "results.md").read_text()
    assert page.startswith("# Mine") and page.endswith("end\n") and page.count("| RestEM") == 0
    assert page.count("| GRPO") == 0 and page.count("| VinePPO |") == 3


def test_runs_of_another_origin_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(compare, "SFT", str(tmp_path))
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf/model.safetensors").write_bytes(b"weights")
    called = []
    monkeypatch.setattr(compare, "run_all", lambda commands, *_: called.append(commands))
    wanted = [("grpo", 6e-5, 1)]
    for _ in range(2):
        compare.train(wanted, str(tmp_path), 1, None)
    assert len(called[1]) == 1 and next(iter(called[1].values()))[0] == "grpo.py"
    (tmp_path / "grpo-lr6e-05-seed1").mkdir()
    (tmp_path / "grpo-lr6e-05-seed1/finished").touch()
    compare.train(wanted, str(tmp_path), 1, None)
    assert called[2] == {}
    (tmp_path / "hf/model.safetensors").write_bytes(b"others")
    with pytest.raises(UsageError, match="is of another command or SFT checkpoint"):
        compare.train(wanted, str(tmp_path), 1, None)


def test_a_fork_runs_as_a_module_and_its_runs_keep_their_names(tmp_path, monkeypatch):
    monkeypatch.setattr(compare, "SFT", str(tmp_path))
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf/model.safetensors").write_bytes(b"weights")
    flags = ("--no-share-rollouts", "--k", "3")
    key = ("vineppo_cheap", 6e-5, 1, *flags)
    runs, commands = compare.plan([key], str(tmp_path))
    path = f"{tmp_path}/vineppo-lr6e-05-seed1-no-share-rollouts-k3"
    assert runs == {key: path} and [*commands] == [f"{path}.log"]
    command = commands[f"{path}.log"]
    assert command[:2] == ["-m", "experiments.vineppo_cheap"] and {*flags, path} <= {*command}


def test_a_failing_run_is_named_and_stops_the_rest(tmp_path):
    bar = SimpleNamespace(n=0, total=0, update=lambda: None, set_postfix_str=lambda _: None)
    commands = {f"{tmp_path}/{i}.log": ["-c", f"import sys; sys.exit({i == 1})"] for i in range(50)}
    with pytest.raises(UsageError, match=r"failed: .*/1\.log says why"):
        compare.run_all(commands, 1, bar)
    assert not os.path.exists(tmp_path / "40.log")
