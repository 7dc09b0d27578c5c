"""The analysis of values, against values that are known, and of credit."""

import json
import math
import os
import random
import re
import shutil
import statistics
import types

import pytest
import torch
from transformers import AutoModelForCausalLM

import ppo
from analysis import ablations, credit, critic, figures, gradient, values
from analysis.exact import exact_values, read_digits, read_prompt
from common import UsageError, data, ranks
from common import steps as steps_module
from common.sampling import Sample
from tasks import chain
from tests.conftest import CHROMIUM, call, call_many, open_page

# ---- measures, by hand ---------------------------------------------------------------------------


def test_measures_of_a_constructed_case():
    truth, predicted = [0.0, 0.5, 1.0, 0.5], [0.05, 0.5, 0.8, 0.3]
    found = values.measure(truth, predicted)
    assert found["mae"] == pytest.approx((0.05 + 0 + 0.2 + 0.2) / 4)
    assert found["close"] == 0.5  # 0.05 counts
    # errors -.05 0 .2 .2: mean .0875, squares .0025 0 .04 .04
    variance = (0.0025 + 0.08) / 4 - 0.0875**2
    assert found["explained"] == pytest.approx(1 - variance / 0.125)
    assert math.isnan(values.measure([1.0, 1.0], [0.0, 1.0])["explained"])


def test_within_problems_the_difficulty_does_not_count():
    rows = [("a", 0.9, 0.8), ("a", 0.7, 0.6), ("b", 0.1, 0.1), ("b", 0.3, 0.1), ("c", 0.5, 0.9)]
    states = [{"prompt": p, "truth": t, "guess": g, "flat": ord(p)} for p, t, g in rows]
    # a: the error is .1 twice, so none within; b: 0 and .2, mean .1, squares .02; truths .04
    assert values.within_problems(states, "guess") == pytest.approx(1 - 0.02 / 0.04)
    assert values.within_problems(states, "truth") == 1
    assert values.within_problems(states, "flat") == pytest.approx(0)  # as GRPO's are
    assert math.isnan(values.within_problems(states[-1:], "guess"))


def test_ceilings_are_what_exact_values_get():
    draw, rollouts = random.Random(0), 20
    states = []
    for prompt in range(4000):
        for _ in range(3):
            exact = min(1.0, prompt / 4000 + draw.random() / 4)
            right = sum(draw.random() < exact for _ in range(rollouts))
            states.append({"prompt": prompt, "truth": right / rollouts, "exact": exact})
    overall, within = values.ceilings(states, rollouts)
    truths, exact = ([s[name] for s in states] for name in ("truth", "exact"))
    assert overall == pytest.approx(values.measure(truths, exact)["explained"], abs=0.01)
    assert within == pytest.approx(values.within_problems(states, "exact"), abs=0.03)
    assert within < 0.6 < 0.9 < overall


def test_error_by_position():
    states = [
        {"truth": 1.0, "ppo": 0.5, "step": 0, "steps": 3},
        {"truth": 1.0, "ppo": 0.8, "step": 1, "steps": 20},
        {"truth": 0.0, "ppo": 0.3, "step": 2, "steps": 3},
    ]
    tenths = values.error_by_position(states, "ppo")
    assert tenths[0] == pytest.approx(0.35) and tenths[6] == pytest.approx(0.3)
    assert all(math.isnan(x) for i, x in enumerate(tenths) if i not in (0, 6))


def test_top_action_of_five_with_ties_and_chance():
    def options(*pairs):
        return [{"truth": truth, "it": predicted} for truth, predicted in pairs]

    found = values.rank_actions(
        [
            options((0.9, 0.1), (0.2, 0.9), (0.3, 0.2)),  # wrong; chance 1/3
            options((0.9, 0.9), (0.86, 0.1), (0.3, 0.2), (0.1, 0.0)),  # right; chance 2/4
            options((0.5, 0.5), (0.0, 0.5), (0.1, 0.5)),  # a tie: 1/3; chance 1/3
            options((0.86, 0.9), (0.9, 0.2), (0.3, 0.2)),  # within 0.05 of the best: right; 2/3
            options((0.5, 0.1), (0.52, 0.5), (0.55, 0.2)),  # all are best: says nothing
            options((0.5, 0.1), (0.56, 0.5), (0.5, 0.2)),  # as noise would have it: nothing either
        ],
        "it",
        256,
    )
    assert found[0] == pytest.approx((0 + 1 + 1 / 3 + 1) / 4)
    assert found[1] == pytest.approx((1 / 3 + 1 / 2 + 1 / 3 + 2 / 3) / 4)
    assert found[2] == 4
    assert values.rank_actions([options((1.0, 0), (1.0, 0), (1.0, 0))], "it", 256)[2] == 0


def test_equal_steps_seldom_seem_to_differ():
    rng = random.Random(0)

    def noisy(value: float) -> float:
        return sum(rng.random() < value for _ in range(256)) / 256

    for value in (0.1, 0.5, 0.9):
        found = [values.differ([noisy(value) for _ in range(5)], 256) for _ in range(300)]
        assert sum(found) < 12  # 1 %
    assert values.differ([noisy(0.5), noisy(0.7), noisy(0.5)], 256)


# ---- estimators, against exact values ------------------------------------------------------------


class TabularPolicy:
    """A Markov policy of the embedded task that is a table of facts; it samples like `Sampler`."""

    def __init__(self, table: torch.Tensor, tokenizer):
        self.table, self.tokenizer = table.tolist(), tokenizer
        self.vocabulary = tokenizer.get_vocab()

    def generate(self, prompt_ids, n, max_tokens, seed, **_):
        rng = random.Random(repr(seed))
        groups = []
        for ids in prompt_ids:
            prompt, response = self.tokenizer.decode(ids).split("\n", 1)
            groups.append([self.go_on(prompt, response, rng) for _ in range(n)])
        return groups

    def go_on(self, prompt: str, response: str, rng: random.Random) -> Sample:
        digit, operations = read_prompt(prompt)
        lines = response.split("\n")[:-1]
        if lines:
            digit = int(re.search(r"=(\d)", lines[-1])[1])
        tokens: list[str] = []
        for op, operand in operations[len(lines) :]:
            result = rng.choices(range(10), self.table["+-".index(op)][digit][operand])[0]
            words = rng.choice(chain.FILLERS), rng.choice(chain.FILLERS)
            tokens += [words[0], str(digit), op, str(operand), "=", str(result), words[1], "\n"]
            digit = result
        tokens += ["####", str(digit), "<eos>"]
        return Sample([self.vocabulary[token] for token in tokens], [], True, False)


TRUTH = 128  # rollouts for it


@pytest.fixture(scope="module")
def tabular():
    """A table that is mostly right, and a prober of its policy."""
    generator = torch.Generator().manual_seed(0)
    table = torch.rand(2, 10, 10, 10, generator=generator)
    for digit in range(10):
        for operand in range(10):
            for i, op in enumerate("+-"):
                right = chain.apply_operation(digit, op, operand)
                table[i, digit, operand, right] += 30 * torch.rand(1, generator=generator).item()
    table /= table.sum(dim=-1, keepdim=True)
    ranks.set_up()
    tokenizer = chain.make_tokenizer()
    args = values.Args(num_prompts=40, num_states=250, num_actions=50, truth=TRUTH)
    return table, values.Prober(args, TabularPolicy(table, tokenizer), tokenizer)


@pytest.fixture(scope="module")
def probed(tabular):
    table, prober = tabular
    problems = data.load_problems("chain", "train")[: prober.args.num_prompts]
    prompts = prober.tokenizer([p.prompt for p in problems])["input_ids"]
    states, responses = values.probe_states(prober, problems, prompts, seed=3)
    for state in states:
        add_exact(state, table)
    return states, responses


def add_exact(state, table):
    digits = [int(state["prompt"][0])]
    digits += [int(re.search(r"=(\d)", text)[1]) for text in state["texts"][: state["step"]]]
    state["exact"] = exact_values(state["prompt"], table)[state["step"], digits[-1]].item()


def test_ground_truth_is_that_of_dynamic_programming(probed, tabular):
    states, _ = probed
    assert {state["step"] for state in states} == set(range(9))
    scores = values.z_scores(states, truth=TRUTH)
    assert len(scores) > 200
    assert abs(statistics.mean(scores)) < 4 / len(scores) ** 0.5
    assert 0.7 < statistics.pvariance(scores) < 1.3
    gap = statistics.mean(state["truth"] - state["exact"] for state in states)
    line = f"\n  truth less exact value: {gap:+.4f} on average; z-scores of {len(scores)} states: "
    line += f"mean {statistics.mean(scores):+.2f}, variance {statistics.pvariance(scores):.2f}"
    assert values.describe("checkpoint", states, [], TRUTH).endswith(line)
    for state in states:
        if state["exact"] in (0.0, 1.0):
            assert state["truth"] == state["exact"]
    # with another policy's table it does not fit
    wrong = [dict(state) for state in states]
    for state in wrong:
        add_exact(state, tabular[0].flip(0))
    assert statistics.pvariance(values.z_scores(wrong, truth=TRUTH)) > 10


def test_estimators_are_unbiased_where_they_should_be(probed):
    """VinePPO's is, everywhere; the group's means are at the prompt and nowhere else, and the mean
    with the own reward in it leans towards that reward."""
    states, _ = probed
    errors = [s["vineppo"] - s["exact"] for s in states]
    noise = [(s["exact"] * (1 - s["exact"]) / 9) ** 0.5 for s in states]
    assert abs(statistics.mean(errors)) < 4 * (sum(x * x for x in noise) ** 0.5) / len(states)
    assert statistics.pvariance(errors) == pytest.approx(
        statistics.mean(x * x for x in noise), rel=0.3
    )
    late = [s for s in states if s["step"] == 8]
    assert all(s["exact"] == s["reward"] for s in late)  # the answer line is right where it is
    assert values.measure([s["exact"] for s in late], [s["vineppo"] for s in late])["mae"] == 0
    for s in states:
        assert s["rloo"] == pytest.approx((8 * s["grpo"] - s["reward"]) / 7)
    by_tenth = values.error_by_position(states, "grpo")
    assert by_tenth[8] > 3 * values.error_by_position(states, "vineppo")[8]
    assert (
        values.measure([s["truth"] for s in states], [s["vineppo"] for s in states])["mae"] < 0.08
    )


def test_top_actions_are_those_of_dynamic_programming(tabular, probed):
    """The truth as estimator is always right; nine rollouts are far above chance; the group's
    mean, the same for every step, is at chance."""
    _, prober = tabular
    actions = values.probe_actions(prober, probed[1], seed=3)
    assert len(actions) > 40
    for options in actions:
        assert 3 <= len(options) <= 5
    truth, chance, decided = values.rank_actions(actions, "truth", TRUTH)
    measured = values.rank_actions(actions, "vineppo", TRUTH)
    group = values.rank_actions(actions, "grpo", TRUTH)
    assert truth == 1 and decided > 5
    assert chance + 0.15 < measured[0] and group[0] == pytest.approx(chance)


def test_critic_is_asked_about_the_right_token(sft_model, tmp_path):
    """A state's value is that of `compute_values` in the whole response; the file is ppo.py's."""
    critic = AutoModelForCausalLM.from_pretrained(sft_model, dtype=torch.float32).eval()
    head = torch.nn.Linear(critic.get_output_embeddings().in_features, 1)
    torch.nn.init.normal_(head.weight)
    critic.set_output_embeddings(head)
    shutil.copytree(sft_model, tmp_path / "hf")
    critic.save_pretrained(tmp_path / "critic_hf")

    class Nothing:
        def wake(self, model):
            pass

    tokenizer = chain.make_tokenizer()
    prober = values.Prober(values.Args(dtype="float32"), Nothing(), tokenizer)
    prober.use(str(tmp_path / "hf"))
    problem = data.load_problems("chain", "train")[0]
    prompt, response = (tokenizer(text)["input_ids"] for text in (problem.prompt, problem.solution))
    starts = [0, 8, 16, 40]
    found = prober.criticize([prompt] * 4, [response[:start] for start in starts])
    with torch.no_grad():
        mask = torch.ones(1, len(response))
        whole = ppo.compute_values(
            critic, torch.tensor([prompt + response]), torch.tensor([len(prompt)]), mask
        )
    assert found == pytest.approx(whole[0, starts].tolist(), abs=1e-5)
    assert max(found) - min(found) > 0.01


# ---- the commands --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ppo_run(sft_model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("values") / "run"
    small = ["--num-prompts", "4", "--group-size", "4", "--minibatch-size", "8"]
    small += ["--num-iterations", "1", "--eval-every", "0", "--model", sft_model]
    call("ppo.py", *small, "--output-dir", str(folder))
    return folder


@pytest.mark.soak
def test_values_of_a_run(ppo_run):
    sizes = ["--num-prompts", "4", "--num-states", "24", "--num-actions", "4", "--truth", "64"]
    result = call("-m", "analysis.values", "--run", str(ppo_run), *sizes)
    for estimator in values.ESTIMATORS:
        assert f"\n  {estimator} " in result.stdout
    assert "iteration 1: 24 states, mean truth" in result.stdout
    with open(ppo_run / "values/iteration_000001.json") as file:
        states = json.load(file)["states"]
    assert len(states) == 24 and all(0 <= s["truth"] <= 1 for s in states)
    assert all("exact" in s for s in states)  # None where the response is no proper chain
    before = os.stat(ppo_run / "values/iteration_000001.json").st_mtime_ns
    again = call("-m", "analysis.values", "--run", str(ppo_run), *sizes)  # done already
    assert again.stdout.splitlines()[-6:] == result.stdout.splitlines()[-6:]
    assert os.stat(ppo_run / "values/iteration_000001.json").st_mtime_ns == before


@pytest.mark.slow
def test_values_and_credit_say_what_they_miss(tmp_path):
    settings = {**vars(ppo.Args()), "script": "ppo"}
    for name, content in (("run", settings), ("sft", {"script": "sft", "task": "chain"})):
        (tmp_path / name / "checkpoints/iteration_000001/hf").mkdir(parents=True)
        (tmp_path / name / "args.json").write_text(json.dumps(content))
    rows = (
        (["-m", "analysis.values", "--run", str(tmp_path)], "args.json: no such file"),
        (["-m", "analysis.values"], "give either --run or --model"),
        (
            ["-m", "analysis.values", "--run", f"{tmp_path}/run", "--iterations", "7"],
            "has checkpoints of [1]",
        ),
        (
            ["-m", "analysis.values", "--run", f"{tmp_path}/sft"],
            "is a run of sft.py, which samples no groups",
        ),
        (["-m", "analysis.credit", "--run", str(tmp_path)], "is not the folder of a run"),
    )
    results = call_many([arguments for arguments, _ in rows])
    for (_, message), (status, _, errors) in zip(rows, results, strict=True):
        assert status == 1 and message in errors and "Traceback" not in errors


def test_credit_is_that_of_the_scripts(tabular):
    """VinePPO's credit is the change in value, which adds up to R - V(s_0); PPO's is the mean of
    R - V_t over a step; GRPO's is the reward's place in its group. Equal states have one value."""
    _, prober = tabular
    problems = data.load_problems("chain", "train")[:4]
    prompts = prober.tokenizer([p.prompt for p in problems])["input_ids"]

    class Ramp(torch.nn.Module):  # a critic whose value of the state before token t is t / 100
        device = "cpu"

        def forward(self, input_ids, use_cache):
            place = torch.arange(input_ids.shape[1]) - (len(prompts[0]) - 1)
            logits = (place / 100).expand(input_ids.shape)[..., None]
            return types.SimpleNamespace(logits=logits)

    prober.critic = Ramp()
    episodes = credit.give_credit(prober, problems, prompts)
    prober.critic = None
    assert len(episodes) == 4 * 8
    for first in range(0, 32, 8):
        group = episodes[first : first + 8]
        assert len({e["steps"][0]["value"] for e in group}) == 1
        rewards = [e["reward"] for e in group]
        mean, spread = statistics.mean(rewards), statistics.pstdev(rewards)
        for e in group:
            steps = e["steps"]
            place = (e["reward"] - mean) / (spread + 1e-8) if spread else 0
            for i, step in enumerate(steps):
                after = steps[i + 1]["value"] if i + 1 < len(steps) else e["reward"]
                assert step["VinePPO"] == pytest.approx(after - step["value"], abs=1e-6)
                assert step["GRPO"] == pytest.approx(place, abs=1e-5)
                start, end = 8 * i, 8 * i + (8 if i < 8 else 3)  # lines of eight tokens
                assert step["critic"] == pytest.approx(start / 100, abs=1e-6)
                middle = (start + end - 1) / 2 / 100
                assert step["PPO"] == pytest.approx(e["reward"] - middle, abs=1e-5)
            assert len(steps) == 9


def test_exact_values_are_added_to_the_right_states(tabular, probed, monkeypatch):
    table, prober = tabular
    monkeypatch.setattr(gradient, "fact_table", lambda *_: table)
    monkeypatch.setattr(gradient, "sample_episodes", lambda *_: [])
    states = [{k: v for k, v in state.items() if k != "exact"} for state in probed[0]]
    states.append({**states[0], "texts": ["so\n", *states[0]["texts"][1:]]})
    values.add_exact_values(prober, states, None, seed=1)
    assert [s["exact"] for s in states] == [*(s["exact"] for s in probed[0]), None]


def test_token_values_change_behind_a_result(tabular):
    table, prober = tabular
    problem = data.load_problems("chain", "sft")[0]
    ids = [*prober.tokenizer(problem.solution)["input_ids"], prober.tokenizer.eos_token_id]
    ends = steps_module.split_steps(ids, prober.tokenizer, "line")
    texts = steps_module.step_texts(ids, ends, prober.tokenizer)
    digits = read_digits(problem.prompt, texts)
    exact = exact_values(problem.prompt, table)
    equals = prober.tokenizer.convert_tokens_to_ids("=")
    episode = gradient.Episode(problem, [], ids, 0.0, ends, [], digits)
    found = critic.token_values(episode, exact, equals)
    for t in range(len(ids)):
        results = len(re.findall(r"=\d", prober.tokenizer.decode(ids[:t])))
        assert found[t] == exact[results, digits[results]]


@pytest.mark.soak
def test_credit_of_a_run(ppo_run):
    result = call("-m", "analysis.credit", "--run", str(ppo_run), "--num-prompts", "4", "--k", "5")
    assert "== any ==" in result.stdout and "   critic      PPO     GRPO  step" in result.stdout
    page = (ppo_run / "credit.html").read_text()
    assert "<th>VinePPO</th><th>critic</th><th>PPO</th><th>GRPO</th>" in page


HOSTILE = "<script>document.title='owned'</script><img src=x onerror='document.title=1'>"
HOSTILE += '"&amp;\x1b[2J\ud800'


def hostile_episode():
    step = {"text": HOSTILE, "value": 0.5, "VinePPO": -1.0, "GRPO": 0.5}
    return {"prompt": HOSTILE, "answer": HOSTILE, "reward": 0.0, "steps": [step]}


def test_terminal_and_page_show_what_a_model_wrote_and_do_nothing_else():
    text = credit.as_text("any", hostile_episode(), coloured=True)
    assert "\x1b[2J" not in text and "\\x1b[2J" in text and "\\ud800" in text
    assert text.count("\x1b") == 2  # the colour and its end
    page = credit.as_page({HOSTILE: hostile_episode()}, HOSTILE)
    page.encode()
    assert "<script" not in page and "<img" not in page and "http" not in page
    assert credit.colour(0.0) == (255, 255, 255) and credit.colour(5.0) == credit.colour(1.0)


@pytest.mark.skipif(not CHROMIUM, reason="no Chromium here")
def test_the_page_in_a_browser(tmp_path):
    (tmp_path / "credit.html").write_text(credit.as_page({"any": hostile_episode()}, "a run"))
    page = open_page(tmp_path / "credit.html")
    assert "<title>Credit</title>" in page  # no script ran
    assert "<script" not in page and "<img" not in page and "&lt;script&gt;" in page
    assert page.count("<td") == 4 and "-1.00" in page and "+0.50" in page


# ---- figures -------------------------------------------------------------------------------------


def made_up_run(shift: float) -> dict:
    """{iteration: (states, actions)}: VinePPO's error is 0.01 + shift, the group's 0.4."""
    states = [
        {"truth": t, "vineppo": t + 0.01 + shift, "grpo": t - 0.4, "ppo": t - 0.4}
        | {"step": i, "steps": 4, "prompt": "aabb"[i]}
        for i, t in enumerate((0.1, 0.5, 0.9, 0.3))
    ]
    options = [{"truth": t, "vineppo": t, "grpo": 0.0, "ppo": -t} for t in (0.1, 0.5, 0.9)]
    return {iteration: (states, [options]) for iteration in (4, 20)}


def test_figures_of_constructed_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(figures, "TRUTH", 9)
    found = {"vineppo": [made_up_run(0.0), made_up_run(0.02)], "grpo": [made_up_run(0.0)]}
    found["ppo"] = [made_up_run(0.2)]
    group_mean = {"a": 0.3, "b": 0.6}
    found["rloo"] = [
        {i: ([s | {"rloo": group_mean[s["prompt"]]} for s in of], []) for i, (of, _) in run.items()}
        for run in [made_up_run(0.0)]
    ]
    summary = figures.summarize(found, (4, 20))
    assert [curve[0]["mae"] for curve in summary["vineppo"]] == pytest.approx([0.01, 0.03])
    assert summary["vineppo"][0][1]["top"] == 1
    assert summary["grpo"][0][1]["top"] == summary["grpo"][0][1]["chance"] == pytest.approx(1 / 3)
    curve = [{"iteration": i, "pass@1": i / 20} for i in range(0, 21, 2)]
    curve = [p | dict.fromkeys(("tokens", "seconds"), 1e5 * p["iteration"]) for p in curve]
    lower = [p | {"pass@1": p["pass@1"] / 2} for p in curve]
    of_k = {k: [curve, curve] for k in ablations.KS}
    of_temperature = {(m, t): [curve] for m in ("vineppo", "ppo") for t in ablations.TEMPERATURES}
    of_temperature["ppo", 1.0] = [lower]
    figures.draw_values(found, 4, str(tmp_path / "values.png"))
    figures.draw_accuracy(summary, found, str(tmp_path / "accuracy.png"))
    ablations.draw_ablations(of_k, of_temperature, str(tmp_path / "ablations.png"))
    for name in ("values", "accuracy", "ablations"):
        assert (tmp_path / f"{name}.png").stat().st_size > 10_000
    fit = {"responses": 6400, "epochs": 2, "curve": [[9, {"explained": 0.5, "within": 0.3}]]}
    page = str(tmp_path / "results.md")
    for _ in range(2):  # the block takes its own place
        figures.write_numbers(found, summary, (4, 20), (1, 2), fit, page)
        ablations.write_numbers(of_k, of_temperature, [1, 2], page)
    text = (tmp_path / "results.md").read_text()
    # by hand: squares within problems add up to 0.26, those of the noise of 9 rollouts to 0.04
    row = "| VinePPO | 0.02 ± 0.13 | 1.00 ± 0.00 | 1.00 ± 0.00 | 1.00 ± 0.00 | 0.85 ± 0.00 |"
    assert text.count(f"{row}\n| GRPO | 0.40 |") == 1
    (of_rloo,) = (line for line in text.splitlines() if line.startswith("| RLOO (on GRPO's runs)"))
    assert of_rloo.endswith("| 0.25 | 0.00 | 0.26 | 0.00 | 0.85 |")  # it knows the problem alone
    assert "| PPO | 0.40 | 0.00 | 1.00 | 1.00 | 0.85 |" in text
    assert "on PPO's states: 0.21." in text
    assert "VinePPO 100% of 4 states (chance 33%), PPO 0% of 2 states (chance 33%)" in text
    assert "fitted 2 times to exact values of 6,400" in text and "explains 50% of" in text
    assert "on other prompts,\n30% of what is left within a response." in text
    assert text.count("| K = 9 | 1.000 ± 0.000 | 2,000 |") == 1
    assert "0.6, 0.8, 1: VinePPO 1.00, 1.00, 1.00; PPO 1.00, 1.00, 0.50." in text


def test_values_are_drawn_against_the_truth(monkeypatch):
    shown = []
    monkeypatch.setattr(figures, "save", lambda figure, output: shown.append(figure))
    found = {"vineppo": [made_up_run(0.0), made_up_run(0.02)], "ppo": [made_up_run(0.0)]}
    figures.draw_values(found, 4, "")
    _, points, means = shown[0].axes[0].lines
    assert list(points.get_xdata()) == [0.1, 0.5, 0.9, 0.3] * 2
    assert list(means.get_ydata()) == pytest.approx([0.12, 0.32, 0.52, 0.92])  # fifths with states
    few = [{"truth": t, "vineppo": t} for t in (0.21, 0.39, 1.0)]
    figures.draw_values({"vineppo": [{4: (few, [])}]}, 4, "")
    assert list(shown[1].axes[0].lines[2].get_xdata()) == pytest.approx([0.3, 1.0])
    figures.draw_accuracy(figures.summarize(found, (4, 20)), found, "")
    errors = shown[2].axes[3].lines[0]
    assert list(errors.get_xdata()) == [5, 25, 55, 75]  # tenths with states of every seed
    assert list(errors.get_ydata()) == pytest.approx([0.02] * 4)
    lost = {20: (found["vineppo"][0][20][0][1:], [])}
    assert len(figures.error_curves([lost, *found["vineppo"]], "vineppo", 20)[0]) == 3


def test_ablations_are_drawn_by_iteration_and_tokens(monkeypatch):
    shown = []
    monkeypatch.setattr(ablations, "save", lambda figure, output: shown.append(figure))
    curve = [{"iteration": i, "tokens": 5000 * i, "pass@1": i / 4} for i in (0, 2, 4)]
    of_temperature = {("vineppo", 0.6): [curve], ("vineppo", 0.8): [curve]}
    ablations.draw_ablations({k: [curve] for k in ablations.KS}, of_temperature, "")
    iterations, tokens, temperatures = shown[0].axes
    assert [list(line.get_xdata()) for line in iterations.lines] == [[0, 2, 4]] * 3
    assert list(tokens.lines[0].get_xdata()) == [10, 20] and tokens.get_xscale() == "log"
    assert [line.get_linestyle() for line in temperatures.lines] == ["--", "-"]
    assert list(temperatures.lines[0].get_xdata()) == [0, 2, 4]


@pytest.mark.parametrize("study", ["figures", "ablations"])
def test_figures_without_runs(tmp_path, study):
    result = call("-m", f"analysis.{study}", "--folder", str(tmp_path), fails=True)
    assert "results.json: no such file; `make compare` (or compare-quick) makes it" in result.stderr
    assert "Traceback" not in result.stderr
    (tmp_path / "results.json").write_text('{"start": 0.1}')  # one for all seeds
    with pytest.raises(UsageError, match="is of an older version: remove"):
        module = figures if study == "figures" else ablations
        module.main(module.Args(folder=str(tmp_path)))
    found = {"starts": [], "best": {"grpo": 6e-5}, "paths": {"grpo": []}, "seeds": []}
    (tmp_path / "results.json").write_text(json.dumps(found))
    with pytest.raises(UsageError, match=f"{tmp_path} lacks runs of "):
        module.main(module.Args(folder=str(tmp_path)))
