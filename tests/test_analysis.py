"""Exact values against chains that are played out; the comparison's readings of a run."""

import dataclasses
import itertools
import json
import math
import os
import random
import re
from types import SimpleNamespace

import pytest
import torch
from matplotlib import pyplot as plt
from transformers import LlamaForCausalLM

import ppo
import sft
from analysis import best_critic, compare, gradient, paired
from analysis import curves as learning_curves
from analysis.exact import DIGITS, OPS, exact_values, read_digits, read_prompt
from common import UsageError, data, steps
from recipes import demo
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
    assert compare.spread([10.0, 20.0, float("inf")], ".0f", bounds=False) == "15, 1 of 3 never"
    assert compare.spread([float("inf")] * 2) == "never"
    never = float("inf")
    shares = compare.shares([8.0, 8.0, never, never], [16.0, never, 2.0, never])
    assert shares == "0.50, never, VinePPO never, never"


def test_a_grid_goes_on_behind_its_edges():
    rates = [1.0, 2.0, 4.0]
    assert not compare.extend(rates, 2.0) and rates == [1.0, 2.0, 4.0]
    assert compare.extend(rates, 1.0) and rates == [1.0, 2.0, 4.0, 0.5]
    assert compare.extend(rates, 4.0) and rates == [1.0, 2.0, 4.0, 0.5, 8.0]


def test_intervals_over_seeds():
    assert compare.interval([0.5, 0.7, 0.6]) == "0.600 ± 0.248"  # 4.303 * 0.1 / sqrt(3)
    assert compare.interval([1.0, 2.0, 3.0, 4.0, 5.0], ".2f") == "3.00 ± 1.96"  # 2.776 * sqrt(0.5)
    assert compare.interval([0.6]) == "0.600"
    assert compare.interval([0.0, 1.0] * 10, ".4f") == "0.5000 ± 0.2595"  # 2.262: as of ten seeds


def test_quantiles_are_those_of_students_t():
    """The density, integrated from 0 to the quantile, gives 0.475."""
    for freedom, quantile in enumerate(compare.T, start=1):
        scale = math.gamma((freedom + 1) / 2) / math.gamma(freedom / 2)
        scale /= math.sqrt(freedom * math.pi)
        x = torch.linspace(0, quantile, 100_001, dtype=torch.float64)
        density = scale * (1 + x**2 / freedom) ** (-(freedom + 1) / 2)
        assert torch.trapezoid(density, x).item() == pytest.approx(0.475, abs=2e-5)


def test_a_band_is_the_seeds_mean_lowest_and_highest():
    long = [{"steps": s, "pass@1": s / 100} for s in (0, 10, 20, 30, 40)]
    short = [{"steps": s, "pass@1": s / 50} for s in (0, 30, 60)]
    figure, panel = plt.subplots()
    compare.draw_band(panel, [long, short], "steps", ("name", "#000000", "o"))
    # halfway and at the end, both seeds are where they are; none is left out
    xs, ys = panel.lines[0].get_data()
    assert (xs[0], xs[2], xs[4]) == (0, 25, 50) and ys[2] == pytest.approx((0.2 + 0.6) / 2)
    corners = panel.collections[0].get_paths()[0].vertices
    assert sorted(y for x, y in corners if x == 50)[::2] == pytest.approx([0.4, 1.2])
    del long[2]["pass@1"], short[1]["pass@1"]  # a point that no seed has
    compare.draw_band(panel, [long, short], "steps", ("name", "#000000", "o"))
    assert list(panel.lines[1].get_xdata()) == [0, 5, 45, 50]
    plt.close(figure)


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
        episodes.append(gradient.Episode(problem, prompt_ids, ids, 0.0, ends, [], digits))
    ((lines, results),) = gradient.result_probabilities(model, tokenizer, episodes, 0.6)
    assert len(lines) == 3 * 8 and results.shape == (24, len(DIGITS))
    for (episode, line), result in zip(lines, results, strict=True):
        sequence = torch.tensor([episode.prompt_ids + episode.ids])
        tokens = tokenizer.convert_ids_to_tokens(sequence[0].tolist())
        place = [i for i, token in enumerate(tokens) if token == "="][line + 1]  # one in the prompt
        assert tokens[place + 1] == str(episode.digits[line + 1])
        logits = model(sequence).logits[0, place] / 0.6
        ids = tokenizer.convert_tokens_to_ids(list(DIGITS))
        torch.testing.assert_close(result, torch.softmax(logits, dim=-1)[ids])


def made_up_curves(methods: tuple[str, ...], last: float = 0.7) -> dict[str, list[list[dict]]]:
    points = [{"pass@1": p, "steps": s, "seconds": 2 * s} for p, s in ((0.1, 0), (last, 8))]
    points = [{**p, "tokens": 1e6 * p["steps"], "iteration": p["steps"]} for p in points]
    points = [{**p, "kl": p["steps"] / 8, "reward": p["pass@1"] / 2} for p in points]
    return {method: [points, points] for method in methods}


def test_results_keep_what_is_written_around_them(tmp_path):
    curves = made_up_curves(("vineppo",)) | made_up_curves(("ppo", "grpo"), 0.5)
    curves["ppo"][0] = made_up_curves(("ppo",), 0.6)["ppo"][0]
    best = {method: 0.1 for method in curves}
    test = {"vineppo": [0.6, 0.8], "ppo": [0.4, 0.7], "grpo": [0.5, 0.7]}
    arguments = (curves, best, test, [0.1, 0.2], (1, 2), 2)
    compare.write_results(str(tmp_path), *arguments, True)
    page = (tmp_path / "results.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("| ")]
    assert rows[1:] == [  # best first
        "| VinePPO | 0.1 | 0.700 ± 1.271 |  | 7 | 13 | 8,000 | 2.0 |",
        "| GRPO | 0.1 | 0.600 ± 1.271 | 0.100 ± 0.000 | never | never | 8,000 | 2.0 |",
        "| PPO | 0.1 | 0.550 ± 1.906 | 0.150 ± 0.635 "
        "| 8, 1 of 2 never | 16, 1 of 2 never | 8,000 | 2.0 |",
    ]
    assert "the same seed:\nPPO 0.83, never (never: " in page  # GRPO never gets there
    assert "takes, as shares of PPO's: steps 0.83, 0.67; seconds 0.83, 0.67.\n" in page
    assert "(test pass@1\n0.150 (0.100 to 0.200)), from which" in page
    assert "over seeds 1, 2; ±" in page and "--seeds 1 2 --methods vineppo ppo grpo`" in page
    page = page.replace("# The methods, compared", "# Mine") + "end\n"
    (tmp_path / "results.md").write_text(page)
    compare.write_results(str(tmp_path), *arguments, True)
    assert (tmp_path / "results.md").read_text() == page
    one = {m: runs[1:] for m, runs in made_up_curves((*compare.METHODS,)).items()}
    best, test = dict.fromkeys(one, 0.1), {method: [0.8] for method in one}
    compare.write_results(str(tmp_path), one, best, test, [0.1], (2,), 2, False)
    page = (tmp_path / "results.md").read_text()
    assert "Seed 2 alone: no interval.\n" in page and "--seeds 2 --no-grid`" in page
    assert "| VinePPO | 0.1 | 0.800 |  | 7 |" in page and "±" not in page


def test_a_comparison_without_a_grid_leaves_that_of_another(tmp_path):
    curves, scores = made_up_curves(("ppo",)), {"ppo": {0.1: [0.7, 0.6], 0.2: [0.5, 0.6]}}
    compare.write_grid(str(tmp_path), scores | {"grpo": {0.2: [0.3, 0.5]}}, (1, 2))
    arguments = (curves, {"ppo": 0.1}, {"ppo": [0.6, 0.8]}, [0.1, 0.1], (3, 4), 2, False)
    compare.write_results(str(tmp_path), *arguments)
    page = (tmp_path / "results.md").read_text()
    assert (
        "| method | 0.1 | 0.2 |\n|---|---|---|\n| PPO | 0.650 | 0.550 |\n| GRPO |  | 0.400 |"
        in page
    )
    assert "over seeds 1, 2.\n" in page and "over seeds 3, 4; ±" in page
    assert "| PPO | 0.1 | 0.700 ± 1.271 | 7 |" in page and "VinePPO" not in page


def test_runs_side_by_side_by_minutes_of_training(tmp_path, monkeypatch):
    """Seconds of evaluation do not count; rewards are smoothed; the start is everybody's."""
    shown = []
    monkeypatch.setattr(plt, "close", shown.append)
    for name, speed in (("slow", 2), ("fast", 1)):
        lines = [
            {"iteration": i, "rollout/reward": i / 10, "time/iteration": speed * 60.0}
            for i in range(1, 7)
        ]
        lines[4] |= {"eval/pass@1": 0.5, "time/evaluate": 7.0, "time/save": 5.0}
        lines[4]["time/iteration"] += 12
        (tmp_path / name).mkdir()
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (tmp_path / name / "metrics.jsonl").write_text(text)
    learning_curves.main([f"{tmp_path}/slow/", f"{tmp_path}/fast"], f"{tmp_path}/c.png", 0.25)
    samples, validation = shown[0].axes
    assert [line.get_label() for line in samples.lines] == ["slow", "fast"]
    assert list(samples.lines[0].get_xdata()) == [2, 4, 6, 8, 10, 12]
    assert list(samples.lines[1].get_ydata()) == pytest.approx([0.3, 0.35, 0.35, 0.35, 0.35, 0.4])
    assert list(validation.lines[0].get_xdata()) == [0, 10]
    assert list(validation.lines[1].get_ydata()) == [0.25, 0.5]
    learning_curves.main([f"{tmp_path}/slow", f"{tmp_path}/fast"], f"{tmp_path}/c.png")  # no start
    assert list(shown[1].axes[1].lines[1].get_ydata()) == [0.5]
    once = json.dumps({"rollout/reward": 0.1, "time/iteration": 60.0})  # and never evaluated
    (tmp_path / "fast" / "metrics.jsonl").write_text(once)
    learning_curves.main([f"{tmp_path}/slow", f"{tmp_path}/fast"], f"{tmp_path}/c.png")
    assert list(shown[2].axes[1].lines[1].get_ydata()) == []
    (tmp_path / "fast" / "metrics.jsonl").write_text('{"iteration": 1, "loss": 1}\n')
    with pytest.raises(UsageError, match="fast has no rewards: name a run of an RL script"):
        learning_curves.main([f"{tmp_path}/slow", f"{tmp_path}/fast"], f"{tmp_path}/c.png")


def test_checkpoints_are_compared_problem_by_problem(tmp_path, capsys):
    of = {"task": "gsm8k", "data_dir": "d", "split": "test", "num_problems": 0, "temperature": 1.0}
    of |= {"max_model_len": 128, "max_response_len": 72}
    draw = random.Random(0)
    before = [draw.random() for _ in range(400)]
    after = [x + 0.1 + 0.02 * draw.gauss(0, 1) for x in before]
    for name, scores, other in (
        ("before", before, {}),
        ("after", after, {}),
        ("warm", after, {"temperature": 0.5}),
        ("few", after[1:], {}),
    ):
        (tmp_path / name).write_text(json.dumps({"model": name, "scores": scores, **of, **other}))
    (tmp_path / "strange").write_text("{}")
    first, second = f"{tmp_path}/before", f"{tmp_path}/after"
    with pytest.raises(UsageError, match="name two files or more"):
        paired.main([first])
    paired.main([first, second])
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines()]
    mean = sum(before) / 400
    assert rows[2][0] == "| before" and rows[2][1].startswith(f"{mean:.3f} (")
    found = [float(x) for x in re.findall(r"[+-]?\d\.\d+", rows[3][2])]
    # 0.02 / sqrt(400) = 0.001; the two means have 0.0144
    assert found[0] == pytest.approx(sum(after) / 400 - mean, abs=6e-4)
    assert found[1:] == pytest.approx([found[0] - 0.00196, found[0] + 0.00196], abs=1.2e-3)
    low, high = re.findall(r"\d\.\d+", rows[3][1])[1:]
    assert float(high) - float(low) == pytest.approx(2 * 1.96 * 0.2887 / 20, abs=0.006)
    for name, message in (
        ("warm", "warm has another temperature than .*before"),
        ("strange", "strange is not what evaluate.py --output writes"),
        ("few", "few: 399 problems; .*before: 400"),
        ("none", "none: no such file; evaluate.py --output writes it"),
    ):
        with pytest.raises(UsageError, match=message):
            paired.main([first, f"{tmp_path}/{name}"])


def test_figures_of_the_comparison(tmp_path, monkeypatch):
    shown = []
    monkeypatch.setattr(compare, "save", lambda figure, output: shown.append(figure))
    curves = made_up_curves(("vineppo", "dpo_pos"))
    del (last := dict(curves["dpo_pos"][0][1]))["reward"]
    curves["dpo_pos"] = [[curves["dpo_pos"][0][0], last]] * 2
    compare.draw_results(curves, "")
    steps, seconds = shown[0].axes
    assert [line.get_label() for line in steps.lines] == ["VinePPO", "DPO-Positive"]
    assert steps.get_xlim()[0] == 0 and steps.get_ylim() == (0, 1)
    assert seconds.get_xscale() == "log" and list(seconds.lines[0].get_xdata()) == [16]
    (legend,) = shown[0].legends  # outside of the panels
    assert [text.get_text() for text in legend.get_texts()] == ["VinePPO", "DPO-Positive"]
    scores = {method: {0.1: [0.7, 0.5]} for method in curves}
    compare.draw_curves(curves, scores, "")
    kl, reward = shown[1].axes
    assert list(kl.lines[0].get_xdata()) == [0, 1]
    assert list(reward.lines[0].get_ydata()) == [0.05, 0.35] and len(reward.lines) == 1
    compare.draw_curves(curves, {m: {0.1: [0.7, 0.5], 0.2: [0.4, 0.6]} for m in curves}, "")
    assert list(shown[2].axes[2].lines[0].get_ydata()) == pytest.approx([0.6, 0.5])
    monkeypatch.undo()
    compare.save(shown[0], str(tmp_path / "results.png"))
    assert (tmp_path / "results.png").stat().st_size > 10_000


def test_each_seed_starts_from_its_own_checkpoint(tmp_path, monkeypatch):
    """All methods of a seed from the same; curves, too, begin with that seed's."""
    monkeypatch.chdir(tmp_path)
    called = []
    monkeypatch.setattr(demo, "call", lambda _, *words: called.append(words))
    for seed, folder in ((1, "runs/sft"), (2, "runs/sft-seed2")):
        with pytest.raises(FileNotFoundError):  # nothing is made here
            demo.make_sft([], seed)
        words = "--output-dir", folder, "--seed", str(seed), "--resume", "no"
        assert called.pop() == ("sft.py", *words)
        os.makedirs(f"{folder}/hf")
        for name in ("hf/model.safetensors", "finished"):
            (tmp_path / folder / name).write_text(str(seed))
        (tmp_path / folder / "validation.json").write_text(json.dumps({"pass@1": seed / 10}))
        made = dataclasses.asdict(sft.Args(seed=seed))
        (tmp_path / folder / "args.json").write_text(json.dumps(made))
        demo.make_sft([], seed)
        assert not called
        (tmp_path / folder / "args.json").write_text(json.dumps(made | {"batch_size": 64}))
        with pytest.raises(UsageError, match=f"{folder} was made with --batch-size 64, not 32: "):
            demo.make_sft([], seed)
    wanted = [(method, 6e-5, seed) for method in ("grpo", "ppo") for seed in (1, 2)]
    _, commands = compare.plan(wanted, str(tmp_path))
    models = [command[command.index("--model") + 1] for command in commands.values()]
    assert models == ["runs/sft/hf", "runs/sft-seed2/hf"] * 2
    monkeypatch.setattr(compare, "run_all", lambda *_: None)
    assert compare.evaluate_starts((1, 2), 1, None) == [0.1, 0.2]


def test_runs_of_another_origin_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(compare, "sft_folder", lambda seed: str(tmp_path))
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
    monkeypatch.setattr(compare, "sft_folder", lambda seed: str(tmp_path))
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


def test_the_best_critic_is_chosen_on_one_seed_and_shown_on_others(tmp_path, monkeypatch):
    """The best within problems, if not over all states: a rate of 0.003 with 8 epochs, and where
    the policy is fixed, 0.01; of ten times the responses, 2 epochs."""
    trained, asked, page = [], [], tmp_path / "results.md"

    def pretend_train(wanted, folder, jobs, bar):
        trained.extend(wanted)
        return {key: str(tmp_path / "-".join(map(str, key))) for key in wanted}

    def pretend_run_all(commands, jobs, bar):
        for command in commands.values():
            asked.append(command[:2] + command[4:])
            path, last = (command[command.index(flag) + 1] for flag in ("--run", "--iterations"))
            os.makedirs(f"{path}/values")
            rate = path.split("critic-learning-rate-")[1].split("-")[0]
            good = rate == ("0.01" if "-1e-12-" in path else "0.003")
            good = good and ("update-epochs-8" in path or last == "200")
            states = []
            for mean, step in itertools.product((0.3, 0.7), (-0.15, -0.05, 0.05, 0.15)):
                guess = 0.5 + step if good else mean + step / 2
                states.append({"prompt": str(mean), "truth": mean + step, "ppo": guess})
            for name, written in ((int(last), states), (7, [])):  # and that of a run that was ended
                with open(f"{path}/values/iteration_{name:06d}.json", "w") as file:
                    json.dump({"states": written}, file)

    monkeypatch.setattr(best_critic, "train", pretend_train)
    monkeypatch.setattr(best_critic, "run_all", pretend_run_all)
    monkeypatch.setattr(best_critic, "make_sft", lambda launcher, *seeds: None)
    with pytest.raises(UsageError, match="on seed 1 the settings are chosen"):
        best_critic.main((1, 2))
    best_critic.main((2, 3), folder=str(tmp_path / "critic"), output=str(page))
    rows = [line for line in page.read_text().splitlines() if line.startswith("| policy")]
    # variances of the truths 0.0525, within problems 0.0125; of the errors 0.003125, 0.04
    defaults = "| 0.001 | 2 | 0.94 ± 0.00 | 0.75 ± 0.00 | 0.81 |"
    best = "0.24 ± 0.00 | 1.00 ± 0.00 | 0.81 |"
    fixed = "| policy fixed", "| policy fixed, ten times the responses"
    assert rows[:4] == [
        f"| policy trained | 1,280 {defaults}",
        f"| policy trained | 1,280 | 0.003 | 8 | {best}",
        f"{fixed[0]} | 1,280 | 0.01 | 8 | {best}",
        f"{fixed[1]} | 12,800 | 0.01 | 2 | {best}",
    ]
    assert rows[4] == "| policy trained | 2 | 0.75 | 0.75 | 0.75 | 0.75 | 0.75 |"
    assert rows[7] == "| policy fixed | 8 | 0.75 | 0.75 | 0.75 | 0.75 | 1.00 |"
    grid = [1] * len(best_critic.RATES)  # on seed 1; then the defaults and the best on two
    of_kinds = [*grid, *grid, 2, 3, 2, 3], [*grid, *grid, 2, 3], [*grid, 2, 3]
    seeds = [seed for of_kind in of_kinds for seed in of_kind]
    trained_until = len(of_kinds[0])
    rates = [ppo.Args.learning_rate if i < trained_until else 1e-12 for i in range(len(seeds))]
    assert [key[:3] for key in trained] == [
        ("ppo", *pair) for pair in zip(rates, seeds, strict=True)
    ]
    for i, (key, command) in enumerate(zip(trained, asked, strict=True)):
        last = "200" if i >= len(seeds) - len(of_kinds[2]) else "20"
        assert key[-8:-2] == ("--num-iterations", last, "--save-every", "20", "--eval-every", "0")
        expected = f"-m analysis.values --iterations {last} --num-prompts 64 --num-states 256"
        assert " ".join(command) == f"{expected} --truth 64 --num-actions 0 --seed {key[2]}"
