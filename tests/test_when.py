"""The map of when VinePPO pays: problems of its settings, what a response should be worth, what it
is worth, and the order in which everything is made."""

import importlib
import itertools
import json
import os
import re
import statistics

import pytest
import torch

from analysis import corners, gradient, predict, when, worth
from analysis.exact import DIGITS, OPS, exact_values, read_digits, read_prompt
from common import UsageError, data, flags, steps
from experiments import trees, vineppo_tree
from recipes import chains
from tasks import chain
from tests.conftest import ROOT


def test_chains_with_the_defaults_are_the_embedded_task(tmp_path):
    (tmp_path / "new.tmp").mkdir()  # of one that was killed
    (tmp_path / "new.tmp/sft.jsonl").write_text("half")
    chains.main(str(tmp_path / "new"))
    with pytest.raises(UsageError, match="exists already"):
        chains.main(str(tmp_path / "new"))
    with pytest.raises(UsageError, match="--operations 3: must be at least 4"):
        chains.main(str(tmp_path / "short"), operations=3)
    assert os.listdir(tmp_path) == ["new"]
    for split in chain.SPLITS:
        with open(tmp_path / f"new/{split}.jsonl") as file:
            ours = [data.Problem(**json.loads(line)) for line in file]
        assert ours == data.load_problems("chain", split)
    found = data.load_problems("jsonl", "test", str(tmp_path / "new"))
    assert found == data.load_problems("chain", "test")


@pytest.mark.parametrize(
    "task", [{"operations": 5}, {"weak": 0.25}, {"slip": 0.2, "words": 3}, {"lost": True}]
)
def test_chains_are_as_wanted(task):
    wanted = {"operations": 8, "weak": 0.5, "slip": 0.5, "words": 1, "lost": False} | task
    wrong, used = {}, {}
    for prompt, answer, solution in chain.make_splits(**task)["sft"][:6000]:
        digit, operations = read_prompt(prompt)
        lines = solution.splitlines(keepends=True)
        digits = read_digits(prompt, lines)
        assert len(operations) == wanted["operations"] == len(lines) - 1
        for (op, operand), line, now, then in zip(
            operations, lines, digits[:-1], digits[1:], strict=False
        ):
            assert len(re.findall("[a-z]+", line)) == 2 * wanted["words"]
            digit = chain.apply_operation(digit, op, operand)
            if now == DIGITS.index(chain.LOST):
                assert then == now
                continue
            right = chain.apply_operation(now, op, operand)
            used[op, now, operand] = used.get((op, now, operand), 0) + 1
            wrong[op, now, operand] = wrong.get((op, now, operand), 0) + (then != right)
            assert then == right or (then == 10) == wanted["lost"]
        assert answer == str(digit)
        assert lines[-1] == f"#### {DIGITS[digits[-1]]}"
    rates = [wrong[fact] / used[fact] for fact in used if wrong[fact]]
    assert len(rates) == round(160 * wanted["weak"])
    assert abs(sum(rates) / len(rates) - wanted["slip"]) < 0.02


# ---- what it should be worth ---------------------------------------------------------------------


def test_noise_is_that_of_all_outcomes():
    """Of two operations: each outcome with its chance, one rollout at both ends of a step."""
    table = torch.rand(2, 11, 10, 11, generator=torch.Generator().manual_seed(3)) ** 4
    table /= table.sum(dim=-1, keepdim=True)
    problems = [(prompt, answer, "") for prompt, answer in (("3+4-2=?\n", "5"), ("7-7+9=?\n", "9"))]
    expected = dict.fromkeys([("results", 0), ("results", 1), ("words", 0), ("words", 1)], 0.0)
    expected["words", -1] = expected["results", -1] = 0.0
    reward = 0.0
    for prompt, *_ in problems:
        digit, operations = read_prompt(prompt)
        values = exact_values(prompt, table)
        for results in itertools.product(range(11), repeat=2):
            digits, chance = [digit, *results], 0.5
            of = [
                table[OPS.index(op), now, operand]
                for (op, operand), now in zip(operations, digits, strict=False)
            ]
            for p, result in zip(of, results, strict=True):
                chance *= p[result].item()
            at = [values[i, d].item() for i, d in enumerate(digits)]
            reward += chance * at[-1]
            for i, p in enumerate(of):
                score = (torch.nn.functional.one_hot(torch.tensor(results[i]), 11) - p).square()
                # one rollout from both ends of the step: both right, one of them, none
                (a, b), square = at[i : i + 2], (at[i + 1] - at[i]) ** 2
                drawn = a * (1 - b) + b * (1 - a)
                # RLOO: this reward less the mean of seven others
                of_others = (at[-1] - at[0]) ** 2 + at[0] * (1 - at[0]) / 7
                for kind, mass in (("results", score.sum().item()), ("words", 1.0)):
                    expected[kind, 0] += chance * mass * square
                    expected[kind, 1] += chance * mass * drawn
                    expected[kind, -1] += chance * mass * of_others
    found, mean = predict.simulate(problems * 1500, table)
    assert abs(mean - reward) < 0.01
    for key, noise in expected.items():
        assert abs(found[key] / noise - 1) < 0.05, key
    weights = {"results": 2.0, "words": 0.5}
    rloo, exact, one = (2 * found["results", i] + found["words", i] / 2 for i in (-1, 0, 1))
    assert predict.predict(found, 0, weights) == pytest.approx(rloo / exact)
    expected_noise = exact + (one - exact) / 4
    assert predict.predict(found, 4, weights) == pytest.approx(rloo / expected_noise)


def test_where_no_token_matters_and_values_change_evenly_the_closed_form_holds():
    """The outcome becomes known in one of S steps, each as likely as another."""
    p, steps, group = 0.3, 9, 8
    for k in (1, 3, 9):
        noise = 0.0  # of all steps
        for known, right in itertools.product(range(steps), (0, 1)):
            chance = (p if right else 1 - p) / steps
            at = [p] * (known + 1) + [right] * (steps - known)
            for a, b in itertools.pairwise(at):
                noise += chance * ((b - a) ** 2 + (a * (1 - a) + b * (1 - b)) / k)
        rloo = p * (1 - p) * group / (group - 1) * steps
        assert predict.closed_form(k, steps, group) == pytest.approx(rloo / noise)


def test_the_closed_form():
    assert predict.closed_form(9, 9, 8) == pytest.approx(8 / 7 * 4.5)
    assert predict.closed_form(1e12, 9, 1e12) == pytest.approx(9)
    assert predict.closed_form(3, 1e12, 1e12) == pytest.approx(3)


def test_the_demonstrators_table_is_sharpened():
    problems = chain.make_splits(slip=0.25)["sft"][:8000]
    table = predict.demonstrators_table(problems, 0.6)
    assert torch.allclose(table.sum(dim=-1)[:, :10, 2:], torch.ones(2, 10, 8))
    seconds = table.topk(2, dim=-1).values[..., 1]
    weak = seconds[seconds > 0.01]
    p = 0.25 ** (1 / 0.6)
    assert len(weak) == 80 and abs(weak.mean() - p / (p + 0.75 ** (1 / 0.6))) < 0.02


# ---- what it is worth ----------------------------------------------------------------------------


def draw(mean: torch.Tensor, noise: float, groups: int, seed: int, unbiased: bool = True) -> dict:
    generator = torch.Generator().manual_seed(seed)
    found = mean + noise * torch.randn(groups, len(mean), generator=generator)
    blocks = found.view(worth.BLOCKS, -1, len(mean))
    counts = torch.full((worth.BLOCKS,), float(groups // worth.BLOCKS))
    squares = blocks.square().sum(dim=(1, 2))
    return {"sums": blocks.sum(1), "squares": squares, "counts": counts, "unbiased": unbiased}


def test_worth_is_the_ratio_of_variances():
    exact = torch.ones(50)
    rloo, ours = draw(exact, 3.0, 4000, 0), draw(exact, 2.0, 4000, 1)
    left = list(range(worth.BLOCKS))
    known = {key: rloo[key] for key in ("sums", "squares", "counts")}
    assert abs(worth.variance(**known) / (9 * 50) - 1) < 0.02
    assert abs(worth.noise_of_a_response(rloo, 8, 50.0) / (9 * 50 * 8 / 50) - 1) < 0.02
    assert abs(worth.slope(rloo["sums"], rloo["counts"], exact, 50.0) - 1) < 0.02
    assert abs(worth.worth(ours, rloo, left, exact, 50.0) - 9 / 4) < 0.05
    value, error = worth.jackknife(
        lambda left: worth.worth(ours, rloo, left, exact, 50.0), worth.BLOCKS
    )
    assert 0.005 < error < 0.018 and abs(value - 9 / 4) < 4 * error  # it is 0.010


def test_the_jackknife_of_a_mean_is_its_standard_error():
    values = [1.0, 2.0, 4.0, 8.0]
    found = worth.jackknife(lambda left: sum(values[i] for i in left) / len(left), 4)
    assert found == pytest.approx((3.75, statistics.stdev(values) / 2))


def test_worth_of_a_biased_estimator_is_that_of_equal_cosine():
    exact = torch.zeros(50)
    exact[0] = 1.0
    off = exact.clone() * 2  # twice as long, and as much aside: its cosine is at most 0.71
    off[1] = 2.0
    rloo, ours = draw(exact, 1.0, 8000, 0), draw(off, 1.0, 8000, 1, unbiased=False)
    left = list(range(worth.BLOCKS))
    size = 8000 / worth.BLOCKS
    cosine2 = 4 / (8 + 50 / size)
    expected = 50 / (1 / cosine2 - 1) / size
    assert abs(worth.worth(ours, rloo, left, exact, 1.0) / expected - 1) < 0.05


# ---- the map -------------------------------------------------------------------------------------


def test_at_its_limit_the_price_is_what_it_is_worth():
    for value, tokens in ((2.1, 38.0), (1.6, 7.4), (6.0, 146.0)):
        price = when.price_limit(value, tokens)
        assert when.cost(tokens, price) == pytest.approx(value)
        assert when.cost(tokens, 0.9 * price) < value < when.cost(tokens, 1.1 * price)
    assert when.price_limit(0.8, 9) == 0 and when.price_limit(9.1, 9) == float("inf")


def make_report(seed: int = 0) -> dict:
    """As analysis/worth.py writes it: noise 2 + 3 / K, RLOO's 7."""
    noise = {"RLOO": 7.0, "exact values": 2.0, "VinePPO, K = 1": 5.0, "VinePPO, K = 3": 3.0}
    tokens = {"VinePPO, K = 1": 5.0, "VinePPO, K = 3": 13.0}
    of = {}
    for name in (*noise, *when.OTHERS):
        of[name] = {"worth": 7 / noise.get(name, 7) + 0.01 * seed, "tokens": tokens.get(name, 1.0)}
        of[name]["error"] = 0.1
    for name in list(noise)[1:]:
        of[name]["expected"] = of[name]["worth"] + 0.5
    return {"reward": 0.3, "chains": 1.0, "steps": 9.0, "estimators": of}


def test_other_ks_follow_from_those_that_were_measured():
    report = make_report()
    for k in (1, 3, 9, 20):
        assert when.worth_at(report, k) == pytest.approx(7 / (2 + 3 / k))
        assert when.tokens_at(report, k) == pytest.approx(1 + 4 * k)
    assert when.worth_at(report, 0) == pytest.approx(7 / 2)
    limits = [(7 / (2 + 3 / k) - 1) / (1 + 4 * k - 7 / (2 + 3 / k)) for k in range(1, 21)]
    best, k = when.best_limit(report)
    assert best == pytest.approx(max(limits)) and limits[k - 1] == max(limits)


def test_the_papers_price():
    """Put back into seconds: PPO trains two models, VinePPO one and samples n times as much."""
    for ppo, vineppo in ((80, 380), (312, 583)):
        price = when.papers_price(ppo, vineppo, k=9, steps=9.8)
        training = ppo / (2 + price)
        tokens = 1 + 9 * (10.8 / 2) - 9 * 7 / 8
        assert training * (1 + price * tokens) == pytest.approx(vineppo)


def test_the_numbers_of_the_rule_are_those_of_its_formula():
    with open(f"{ROOT}/docs/when.md") as file:
        page = " ".join(file.read().split())
    limits, best = [], set()
    for steps_ in (5, 9, 17, 33):
        of_k = []
        for k in range(1, 40):
            tokens = 1 + k * ((steps_ + 1) / 2 - 7 / 8)
            of_k.append((when.price_limit(predict.closed_form(k, steps_), tokens), k))
        limits.append(f"{max(of_k)[0]:.2f}")
        best.add(max(of_k)[1])
    assert "at most {} for 5 steps, {} for 9, {} for 17 and {} for 33".format(*limits) in page
    assert "K = 4 to 7, the best" in page and best <= {4, 5, 6, 7}
    assert "about {:.2f} for Rho-1B and {:.2f} for 7B".format(*when.PRICES.values()) in page


def test_tables_and_figures_from_reports(tmp_path):
    found = {name: [make_report(0), make_report(1)] for name in when.SETTINGS if name != when.BASE}
    before = {name: dict.fromkeys(when.KS, 2.5) for name in found}
    text = when.make_tables(found, before)
    rows = [line for line in text.splitlines() if line.startswith("| 8 operations |")]
    first, second = (row.split(" | ") for row in rows)
    after = sum(when.worth_at(report, 3, "expected") for report in found["center"]) / 2
    assert first[1:5] == ["2", "0.30", f"2.5, {after:.1f}", "2.34 ± 0.06"]
    assert first[7] == "13.0" and second[1] == "1.00 ± 0.06 for 1.0"
    ks = [when.best_limit(report)[1] for report in found["center"]]
    assert first[8].endswith(f" ({ks[0]}, {ks[1]}) |")
    assert when.measured(found["center"][:1], "VinePPO, K = 3") == "2.33 ± 0.10"
    when.draw_lengths(found, before, str(tmp_path))
    when.draw_settings(found, before, str(tmp_path))
    assert {*os.listdir(tmp_path)} == {"when.png", "when_settings.png"}


def test_a_checkpoint_is_made_after_the_one_that_it_starts_from(tmp_path, monkeypatch):
    order = []

    def pretend(ready, jobs, bar):
        for command in ready.values():
            order.append(command)
            (path,) = [
                path
                for name in when.SETTINGS
                for path, other in when.commands(name, 1, str(tmp_path))
                if other == command
            ]
            if "sft.py" in command:
                model = command[command.index("--model") + 1]
                done = model.removesuffix("/hf") + "/finished"
                assert model.endswith("problems/new") or os.path.exists(done), command
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(path, "w") as file:
                json.dump({}, file)

    monkeypatch.setattr(when, "run_all", pretend)
    every = [(name, 1) for name in when.SETTINGS]
    when.make([("center", 1), ("center", 1)], str(tmp_path), 2, measure=False)
    assert [command[1] for command in order] == ["recipes.chains", "--model"] * 2
    when.make([("steps32", 1)], str(tmp_path), 2)
    assert not (tmp_path / "steps16-seed1/worth.json").exists()  # it is only where steps32 starts
    when.make([*reversed(every)], str(tmp_path), 2)
    assert len(order) == 3 * len(when.SETTINGS) - 1
    order.clear()
    when.make(every, str(tmp_path), 2)
    when.make([("center", 1)], str(tmp_path), 2)
    assert not order
    changed = when.SETTINGS["steps16"]._replace(slip=0.3)  # steps32 starts from it
    monkeypatch.setitem(when.SETTINGS, "steps16", changed)
    when.make([("center", 1)], str(tmp_path), 2)
    monkeypatch.setitem(when.SETTINGS, "lost", when.SETTINGS["lost"]._replace(label="another"))
    when.make([("lost", 1)], str(tmp_path), 2)
    os.remove(tmp_path / "right1-seed1/settings.json")
    for name in ("steps16", "steps32", "right1"):
        with pytest.raises(UsageError, match=f"{name}-seed1 is of other settings"):
            when.make([(name, 1)], str(tmp_path), 2)


def test_what_was_measured_is_kept_for_the_next_seeds(tmp_path, monkeypatch):
    made, page = [], tmp_path / "docs/when.md"

    def pretend(wanted, folder, jobs):
        for name, seed in wanted:
            made.append((name, seed))
            os.makedirs(f"{folder}/{name}-seed{seed}")
            with open(f"{folder}/{name}-seed{seed}/worth.json", "w") as file:
                json.dump(make_report(seed), file)

    def draw(folder, *seeds, settings=("base", "center")):
        made.clear()
        when.main(seeds, settings, str(tmp_path / folder), str(tmp_path / "docs"))
        return [line for line in page.read_text().splitlines() if line.startswith("| 8 op")]

    monkeypatch.setattr(when, "make", pretend)
    monkeypatch.setattr(when, "expect", lambda setting: dict.fromkeys(when.KS, 2.5))
    with pytest.raises(UsageError, match="has no figures yet: name a seed"):
        draw("nothing")
    before = draw("here", 2)
    after = draw("elsewhere", 1, 2)  # nothing of the first machine's runs is left
    assert made == [("center", 1)]
    both = [make_report(1), make_report(2)]
    found = {"center": both[1:]}, {"center": both}
    expected = [when.make_tables(of, {"center": when.expect(None)}) for of in found]
    assert all(row in expected[0] for row in before) and "| 8 operations | 1 |" in before[0]
    assert all(row in expected[1] for row in after) and "| 8 operations | 2 |" in after[0]
    assert draw("nowhere") == after and not made
    kept = (tmp_path / "docs/when.json").read_text()
    changed = when.SETTINGS["base"]._replace(epochs=0.7)  # center starts from it
    monkeypatch.setitem(when.SETTINGS, "base", changed)
    with pytest.raises(UsageError, match="has no figures yet"):
        draw("again")
    assert (tmp_path / "docs/when.json").read_text() == kept  # whoever changes it back has them
    assert draw("again", 2) == before and made == [("center", 2)]
    report = make_report(3) | {"chains": 0.8}  # SFT did not teach it: its values are no chain's
    when.update_record(
        str(tmp_path / "docs/when.json"),
        {"center-seed3": {"made_for": when.made_for("center"), "machine": "", "report": report}},
    )
    assert draw("again", 2, 3) == before and not made
    assert "are chains):\ncenter-seed3." in page.read_text()


def of_command(command: list[str]) -> dict[str, str]:
    return dict(zip(command[1::2], command[2::2], strict=True))


def test_the_others_get_as_much_as_vineppo_and_are_tuned(tmp_path, monkeypatch):
    """Budgets of 1, 2.5 and 6 times the responses; the best of each grid is run on other seeds."""
    made, commands = [], []
    last = {"time/rollouts": 6.0, "tokens/rollouts": 500.0, "time/sample": 1.0}
    last |= {"time/logprobs": 1.0, "time/update": 2.0, "tokens/sample": 100.0}

    def pretend(ready, jobs, bar):
        for command in ready.values():
            commands.append(command)
            of = of_command(command)
            os.makedirs(of["--output-dir"])
            # best: the middle rate, for RLOO one beyond the grid; and many prompts
            best = 4.8e-4 if command[0] == "rloo.py" else 1.2e-4
            right = 0.5 - 1e3 * abs(float(of["--learning-rate"]) - best)
            right += 0.01 * int(of["--num-prompts"]) + 0.001 * int(of["--seed"])
            if of["--learning-rate"] == "6e-05":  # lucky on one of the seeds that choose
                right += {"1": 0.1, "7": -0.1}.get(of["--seed"], 0.0)
            with open(f"{of['--output-dir']}/metrics.jsonl", "w") as file:
                file.write(json.dumps({**last, "iteration": 1, "eval/pass@1": right}))
            open(f"{of['--output-dir']}/finished", "w").close()

    def make(wanted, folder, jobs, measure):
        made.append((*wanted, folder, measure))

    monkeypatch.setattr(corners, "run_all", pretend)
    monkeypatch.setattr(corners, "make", make)
    page = tmp_path / "when.md"

    def compare(*settings, folder="here", seeds=(2, 4)):
        made.clear()
        commands.clear()
        corners.main(settings, seeds, str(tmp_path / folder), str(tmp_path))
        return page.read_text()

    with pytest.raises(UsageError, match="has no figures yet: name --settings"):
        compare()
    compare("center")
    assert made == [(("center", 1), str(tmp_path / "here"), False)]
    rows = [line.split(" | ") for line in page.read_text().splitlines() if " ± 0" in line]
    assert [row[1] for row in rows[:2]] == ["VinePPO, K = 3", "GRPO, equal responses"]
    sizes = {row[1]: (row[2], row[3], row[4]) for row in rows}
    assert sizes["VinePPO, K = 3"] == ("10 x 64", "0.00012", "1.0")
    assert sizes["GRPO, equal responses"] == ("3 x 256", "0.00012", "1.0")
    assert sizes["RLOO, equal seconds"] == ("7 x 256", "0.00048", "2.5")  # rather more
    assert sizes["GRPO, equal tokens"] == ("15 x 256", "0.00012", "6.0")
    assert rows[1][5].startswith("0.823 ± ")
    tuning = "| RLOO | 60 x 64 | 0.164 | 0.224 | 0.344 | 0.584 | 0.104 |"
    assert tuning in page.read_text()
    assert "| GRPO | 60 x 64 | 0.524 | 0.584 | 0.464 |  |  |" in page.read_text()
    for command in commands:  # each can be given to its script
        script = importlib.import_module(command[0].removesuffix(".py"))
        monkeypatch.setattr("sys.argv", command)
        args = flags.parse(script.Args)
        flags.check(args, args.num_prompts * args.group_size)
        of = of_command(command)
        assert of["--output-dir"].startswith(f"{tmp_path}/here/center-seed1/corners/")
        assert of["--model"] == f"{tmp_path}/here/center-seed1/sft/hf"
    before = page.read_text()
    assert compare("center", folder="elsewhere") == before and not made and not commands
    both = compare("steps4")  # the page keeps the other setting
    assert made and all(row in both for row in before.splitlines() if row.startswith("| 8 op"))
    (tmp_path / "when.md").unlink()
    assert compare().count("| 4 operations | RLOO, equal tokens") == 1 and not made
    compare("center", seeds=(2, 5))
    assert made and not [c for c in commands if of_command(c)["--seed"] in "147"]  # one is new
    changed = when.SETTINGS["base"]._replace(epochs=0.7)  # both start from it
    monkeypatch.setitem(when.SETTINGS, "base", changed)
    compare("center", folder="again")
    assert made and "| 4 operations" not in page.read_text()
    with open(tmp_path / "corners.json") as file:
        assert {*json.load(file)} == {"center", "steps4"}  # nothing is lost


def test_the_tree_that_is_measured_is_the_forks():
    """Its gradient from branches alone, and as the fork computes it, from two rows of a batch."""
    tokenizer = chain.make_tokenizer()
    model = chain.make_model(tokenizer, seed=0).eval()
    problems, episodes, draws, branches = data.load_problems("chain", "test"), [], [], []
    credit = torch.zeros(2, 80)
    for row, problem in enumerate(problems[:2]):
        prompt_ids, ids = tokenizer([problem.prompt, problem.solution]).input_ids
        ends = steps.split_steps(ids, tokenizer, "line")
        episodes.append(gradient.Episode(problem, prompt_ids, ids, 1.0 - row, ends, [], None))
        credit[row, : len(ids)] = torch.arange(len(ids)) / 10 - row
        given = credit[row, : len(ids)].tolist()
        branches.append([(0, ids, given, vineppo_tree.weigh(0, ids, ends, 1))])
        draws.append([])
        for number, start in enumerate([0, *ends[:-1]]):
            other = tokenizer(problems[10 + number].solution).input_ids[start : 60 - number]
            draws[-1].append([gradient.Draw(float(number % 2), other)])
            whole = ids[:start] + other
            weights = vineppo_tree.weigh(
                start, whole, steps.split_steps(whole, tokenizer, "line"), 1
            )
            own = [number % 2 - (1.0 - row)] * len(other)
            branches[-1].append((start, whole, own, weights))
    options = model, tokenizer, episodes, draws, credit, 0.6
    found, tokens = worth.tree_gradient(*options)
    prompts = [e.prompt_ids for e in episodes]
    batch = trees.make_batch(prompts, branches, 10_000, torch.device("cpu"))
    logprobs = vineppo_tree.compute_logprobs(model, *batch.take([0, 1]), temperature=0.6)
    (logprobs * trees.pad(branches, 2) * trees.pad(branches, 3)).sum().backward()
    expected = gradient.flat_gradient(model)
    assert torch.allclose(found, expected, atol=1e-4) and expected.norm() > 1
    assert tokens == batch.response_mask.sum() - sum(len(e.ids) for e in episodes)
