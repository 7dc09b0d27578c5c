"""Copies what the policy-gradient scripts share from vineppo.py into the others.

python -m tests.sync_scripts
"""

import difflib
import os
import re

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
SOURCE = "vineppo.py"
COPIES = ["ppo.py", "grpo.py", "rloo.py"]
# The sections that make a script what it is; those with a letter are PPO's critic.
OWN = {"0", "2 tail", "3", "5b", "6.5", "6.6b"}
LEARNING_RATE = re.compile(r"^    learning_rate: float = .*$", re.MULTILINE)  # each its own best


def read_sections(text: str) -> dict[str, str]:
    """{number: text} in order; "0" is the docstring, "2 tail" the flags of the estimator. Joined,
    the sections give the text back."""
    banner = re.compile(
        r"^ *# ==== ([0-9.]+b?\.?) .*$|^    # (advantage estimation)\b.*$", re.MULTILINE
    )
    sections, start, name = {}, 0, "0"
    for match in banner.finditer(text):
        sections[name] = text[start : match.start()]
        start, name = match.start(), "2 tail" if match[2] else match[1].rstrip(".")
    sections[name] = text[start:]
    return sections


def synced(text: str, source: str) -> str:
    """`text` with every shared section as it stands in `source`, the learning rate apart."""
    own, shared = read_sections(text), read_sections(source)
    rate = LEARNING_RATE.search(own["2"])[0]
    shared["2"] = LEARNING_RATE.sub(rate, shared["2"])
    return "".join(own[name] if name in OWN else shared[name] for name in own)


def count_differences(one: str, other: str) -> tuple[int, int]:
    """(rows that differ in `diff -y`, hunks of `diff`) of two texts."""
    matcher = difflib.SequenceMatcher(None, one.splitlines(), other.splitlines(), autojunk=False)
    changes = [code for code in matcher.get_opcodes() if code[0] != "equal"]
    return sum(max(i2 - i1, j2 - j1) for _, i1, i2, j1, j2 in changes), len(changes)


def main() -> None:
    with open(os.path.join(ROOT, SOURCE)) as file:
        source = file.read()
    for name in COPIES:
        path = os.path.join(ROOT, name)
        with open(path) as file:
            before = file.read()
        after = synced(before, source)
        if after != before:
            with open(path, "w") as file:
                file.write(after)
            print(f"{name}: brought in line with {SOURCE}")


if __name__ == "__main__":
    main()
