"""The policy-gradient scripts are one text with several estimators, to the byte; the other three
share passages with them."""

import pytest

from tests.sync_scripts import (
    COPIES,
    LEARNING_RATE,
    MORE,
    OTHERS,
    OWN,
    SOURCE,
    count_differences,
    find_passage,
    read_passage,
    read_sections,
    synced,
    synced_passages,
    with_differences,
)
from tests.sync_scripts import read_file as read

BUDGETS = {"vineppo.py": 360, "ppo.py": 420, "grpo.py": 310, "rloo.py": 310, "sft.py": 190}
BUDGETS |= {"restem.py": 290, "dpo_pos.py": 310}
# Rows of `diff -y` that differ, docstrings and flags counted: the least that the estimators allow,
# with a few rows to spare.
DIFFERENCES = {
    ("grpo.py", "rloo.py"): 22,
    ("grpo.py", "vineppo.py"): 75,
    ("rloo.py", "vineppo.py"): 75,
    ("ppo.py", "vineppo.py"): 150,
    ("vineppo.py", "experiments/vineppo_cheap.py"): 60,
    ("vineppo.py", "experiments/vineppo_tree.py"): 60,
    ("vineppo.py", "experiments/vineppo_unsure.py"): 60,
}


@pytest.mark.parametrize("name", [SOURCE, *COPIES])
def test_sections_are_all_there_and_in_order(name):
    sections = read_sections(read(name))
    expected = ["0", "1", "2", "2 tail", "3", "4", "5", "5.1"]
    expected += [*(f"6.{i}" for i in range(1, 9)), "7"]
    if name == "ppo.py":
        expected.insert(expected.index("5.1"), "5b")
        expected.insert(expected.index("6.7"), "6.6b")
    assert list(sections) == expected and "".join(sections.values()) == read(name)


@pytest.mark.parametrize("name", COPIES)
def test_shared_sections_are_the_same(name):
    text, source = read(name), read(SOURCE)
    assert synced(text, source, name) == text, "`python -m tests.sync_scripts` mends it"
    ours, theirs = read_sections(text), read_sections(source)
    for sections in (ours, theirs):
        sections["2"] = LEARNING_RATE.sub("", sections["2"])
    different = {section for section in theirs if ours[section] != theirs[section]}
    assert different <= OWN | ({"1", "4"} if name in MORE else set())


def test_no_shared_line_names_an_algorithm():
    for section, text in read_sections(read(SOURCE)).items():
        if section not in OWN:
            assert not any(name in text.lower() for name in ("vineppo", "grpo", "rloo")), section


@pytest.mark.parametrize("name", COPIES)
@pytest.mark.parametrize("section", ["2", "4", "6.6", "7"])
def test_a_changed_line_is_found_and_mended(name, section):
    """A test of the tests above, and of the fixer."""
    source = read(SOURCE)
    sections = read_sections(read(name))
    sections[section] = sections[section].replace("\n", "\n# changed\n", 1)
    broken = "".join(sections.values())
    assert read_sections(broken)[section] != read_sections(source)[section]
    assert synced(broken, source, name) == read(name)


PASSAGES_OF = [(script, name) for script, names in OTHERS.items() for name in sorted(names)]


@pytest.mark.parametrize(("script", "name"), PASSAGES_OF)
def test_shared_passages_are_the_same(script, name):
    ours, source = read_passage(read(script), name), read_passage(read(SOURCE), name)
    assert ours == source, f"{name}: `python -m tests.sync_scripts` mends it"


@pytest.mark.parametrize(("script", "name"), PASSAGES_OF)
def test_a_changed_passage_is_found_and_mended(script, name):
    text, source = read(script), read(SOURCE)
    start, end = find_passage(text, name)
    lines = text[start:end].splitlines(keepends=True)
    middle = len(lines) // 2
    broken = "".join([text[:start], *lines[:middle], "  # changed\n", *lines[middle:], text[end:]])
    assert read_passage(broken, name) != read_passage(source, name)
    assert synced_passages(broken, source, OTHERS[script]) == text


@pytest.mark.parametrize(("pair", "rows"), DIFFERENCES.items())
def test_difference(pair, rows):
    assert count_differences(*map(read, pair))[0] <= rows


@pytest.mark.parametrize(("name", "lines"), BUDGETS.items())
def test_length(name, lines):
    assert len(read(name).splitlines()) <= lines


def test_the_readme_shows_the_differences_of_today():
    text = read("README.md")
    assert "<!-- differences -->" in text
    assert with_differences(text) == text, "`python -m tests.sync_scripts` mends it"


@pytest.mark.parametrize("script", ["ppo.py", "vineppo.py"])
def test_the_readme_shows_the_estimators_as_they_are(script):
    """Behind a line `<!-- ppo.py -->`: lines of the script, in order, none between them but where
    the excerpt has `...`."""
    excerpt = read("README.md").split(f"<!-- {script} -->")[1].split("```")[1]
    position, text = 0, read(script)
    for part in excerpt.removeprefix("python\n").split("    ...\n"):
        position = text.find(part, position)
        assert position >= 0, part
        position += len(part)
