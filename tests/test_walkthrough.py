"""The numbers of docs/walkthrough.md agree with one another, and with the run that made them."""

import math
import os
import re
import statistics
import xml.etree.ElementTree as ElementTree
from types import SimpleNamespace

import pytest

from analysis import idea, walkthrough
from common import UsageError
from tests.conftest import ROOT, call, read_jsonl


def read_tables(page: str) -> list[list[list[str]]]:
    """Tables, rows, cells; without the line below a head."""
    blocks = re.findall(r"(?:^\|.*\|\n)+", page, re.MULTILINE)
    lines = [[line for line in block.splitlines() if "---" not in line] for block in blocks]
    return [[[cell.strip() for cell in line[1:-1].split("|")] for line in of] for of in lines]


def read_columns(table: list[list[str]]) -> dict[str, list[str]]:
    return dict(zip(table[0], map(list, zip(*table[1:], strict=True)), strict=True))


def numbers(cells: list[str]) -> list[float]:
    return [float(cell) for cell in cells]


def check_page(page: str) -> None:
    """All that can be computed from what the page itself says, as its prose says it."""
    responses, *rest = map(read_columns, read_tables(page))
    credit = next(table for table in rest if "state" in table)
    losses = next(table for table in rest if "ratio" in table)
    moved = next(table for table in rest if "after it" in table)
    compared = next(table for table in rest if "GRPO" in table)
    answer = re.search(r"right answer here is (\d)\.", page)[1]
    k = int(re.search(r"We take K = (\d+)", page)[1])
    assert responses["a right response"][-1].rstrip("`") in ("", f"`#### {answer}")
    assert f"`#### {answer}`" in responses["a right response"]
    wrong = [cell for cell in responses["a wrong response"] if cell]
    assert wrong == credit["step"] == compared["step"]

    # values: the share of rollouts that are right, and right is what ends with the answer
    values, advantages = numbers(credit["its value"]), numbers(credit["advantage"])
    valued = re.search(r"V\(s(\d+)\) = (\d\.\d\d)\. The next step", page)
    worst = int(valued[1])
    rollouts = [table for table in rest if "rollout" in table]
    for state, table in zip((worst, worst + 1), rollouts, strict=False):
        assert len(table["reward"]) == k
        right = [text.rstrip("`").endswith(f"#### {answer}") for text in table["how it goes on"]]
        assert right == [reward == "1" for reward in table["reward"]]
        assert statistics.mean(right) == pytest.approx(values[state], abs=0.005)
    changes = [b - a for a, b in zip(values, [*values[1:], 0.0], strict=True)]
    assert advantages == pytest.approx(changes, abs=0.011)
    assert advantages[worst] == min(advantages) and numbers(compared["VinePPO"]) == advantages
    promised = float(re.search(r"R - V\(s0\) = ([+-][\d.]+)", page)[1])
    assert promised == pytest.approx(-values[0], abs=0.005)

    # whitening, then the loss of three tokens
    found = re.search(r"\(([+-][\d.]+) - \(([+-][\d.]+)\)\) / ([\d.]+) = ([+-][\d.]+)\.", page)
    advantage, mean, spread, whitened = map(float, found.groups())
    assert advantage == advantages[worst]
    assert (advantage - mean) / spread == pytest.approx(whitened, abs=0.0051 / spread)
    low, high = map(float, re.search(r"clip\(ratio, ([\d.]+), ([\d.]+)\)", page).groups())
    losses["KL"] = [cell.split()[0] for cell in losses["KL"]]
    rows = zip(*(numbers(losses[name]) for name in list(losses)[1:]), strict=True)
    for old, new, ratio, given, taken, kl in rows:
        assert ratio == pytest.approx(math.exp(new - old), abs=2e-4)
        clipped = min(max(ratio, low), high) * given
        assert taken == pytest.approx(min(ratio * given, clipped), abs=2e-3) and kl >= 0
    assert float(losses["advantage"][0]) == pytest.approx(whitened, abs=1e-3)
    added_up = r"such rows of all [\d,]+\s+tokens, it is (\S+)\. The script had (\S+)\."
    losses_of_both = re.search(added_up, page)
    by_hand, script = map(float, losses_of_both.groups())
    assert by_hand == pytest.approx(script, abs=1e-6)
    before = dict(zip(moved["token"], numbers(moved["before the update"]), strict=True))
    for token, old in zip(losses["token"][:2], numbers(losses["old"])[:2], strict=True):
        assert before[token.split(" of step")[0]] == pytest.approx(math.exp(old), abs=1e-3)

    # the other algorithms
    others, num_right = map(int, re.search(r"0 - (\d+)/(\d+)", page).groups()[::-1])
    size = others + 1
    share = num_right / size
    rloo, grpo = -num_right / others, -share / math.sqrt(share * (1 - share))
    assert {*compared["RLOO"]} == {f"{rloo:+.2f}"} and {*compared["GRPO"]} == {f"{grpo:+.2f}"}


def test_the_page_agrees_with_itself():
    with open(f"{ROOT}/docs/walkthrough.md", encoding="utf-8") as file:
        check_page(file.read())


@pytest.mark.soak
def test_the_page_is_of_the_run(sft_model, tmp_path):
    few = ["--num-iterations", "2", "--eval-every", "0", "--model", sft_model]
    call("ppo.py", *few, "--output-dir", str(tmp_path / "ppo"))
    words = ["--model", sft_model, "--critic", str(tmp_path / "ppo"), "--seed", "1"]
    words += ["--page", str(tmp_path / "page.md"), "--picture", str(tmp_path / "idea.svg")]
    call("-m", "analysis.walkthrough", *words, "--output-dir", str(tmp_path / "run"))
    page = (tmp_path / "page.md").read_text()
    check_page(page)
    (line,) = read_jsonl(tmp_path / "run/metrics.jsonl")
    total, right, reward = re.search(
        r"Of all (\d+) responses (\d+) are right. The log calls this share `reward`: (\S+)\.", page
    ).groups()
    assert float(reward) == pytest.approx(line["rollout/reward"], abs=5e-4)
    assert int(right) / int(total) == pytest.approx(line["rollout/reward"])
    assert "learnt for 2 iterations" in page
    drawn = {text.text for text in ElementTree.parse(tmp_path / "idea.svg").iter() if text.text}
    credit = next(t for t in map(read_columns, read_tables(page)) if "state" in t)
    assert {*credit["its value"]} <= drawn


def test_the_picture_escapes_what_a_model_wrote():
    hostile = "</text><script>alert(1)</script>&\n"
    facts = SimpleNamespace(prompt=hostile, texts=[hostile] * 2, values=[0.5, 1.0], worst=1)
    facts.advantages, facts.reward = [0.5, -1.0], 0.0
    facts.rollouts = [[("", 1.0), ("", 0.0)], [("", 1.0), ("", 1.0)]]
    root = ElementTree.fromstring(idea.draw(facts))
    words = [text.text for text in root.iter() if text.text]
    assert not [one for one in root.iter() if one.tag.endswith("script")]
    assert hostile.strip() in words and "-1.00" in words and words.count("✓") == 3


def test_a_missing_critic_is_named(tmp_path):
    args = walkthrough.Args(critic=str(tmp_path), output_dir=str(tmp_path / "run"))
    with pytest.raises(UsageError, match="no run is there"):
        walkthrough.main(args)
    assert not os.path.exists(tmp_path / "run")
