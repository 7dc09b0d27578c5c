"""Copies what the policy-gradient scripts share from vineppo.py into the others.

python -m tests.sync_scripts
"""

import os
import re

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
SOURCE = "vineppo.py"
COPIES = ["grpo.py", "rloo.py"]
OWN = {"0", "2 tail", "3", "6.5"}  # the sections that make a script what it is


def read_sections(text: str) -> dict[str, str]:
    """{number: text} in order; "0" is the docstring, "2 tail" the flags of the estimator. Joined,
    the sections give the text back."""
    banner = re.compile(r"^ *# ==== ([0-9.]+) .*$|^    # (advantage estimation)\b.*$", re.MULTILINE)
    sections, start, name = {}, 0, "0"
    for match in banner.finditer(text):
        sections[name] = text[start : match.start()]
        start, name = match.start(), "2 tail" if match[2] else match[1].rstrip(".")
    sections[name] = text[start:]
    return sections


def synced(text: str, source: str) -> str:
    """`text` with every shared section as it stands in `source`."""
    own, shared = read_sections(text), read_sections(source)
    return "".join(own[name] if name in OWN else shared[name] for name in shared)


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
