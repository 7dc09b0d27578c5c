"""Copies what the scripts share from vineppo.py into the others, and their differences, counted,
into the README.

python -m tests.sync_scripts
"""

import difflib
import os
import re
import textwrap

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
SOURCE = "vineppo.py"
COPIES = ["ppo.py", "grpo.py", "rloo.py", "experiments/vineppo_cheap.py"]
COPIES += ["experiments/vineppo_unsure.py", "experiments/vineppo_tree.py"]
# The sections that make a script what it is; those with a letter are PPO's critic.
OWN = {"0", "2 tail", "3", "5b", "6.5", "6.6b"}
# What a fork has of its own beside them: sections, and passages of shared ones.
MORE = {"experiments/vineppo_tree.py": ({"1"}, ["log-probs"])}
LEARNING_RATE = re.compile(r"^    learning_rate: float = .*$", re.MULTILINE)  # each its own best
# What stands in the other three as well, indented as it may be: (first line, last line).
PASSAGES = {
    "sampling flags": ("max_response_len: int", "nucleus sampling"),
    "log-probs": ("def compute_logprobs(", "return torch.zeros_like(response_mask)"),
    "schedule": ("def learning_rate_at(", "return peak * "),
    "set-up": ("logger = run.Run(", "ref_model = copy.deepcopy"),
    "engine": ("policy = engines.initialize(", "trained = "),
    "sampling": ("# ==== 6.1 draw prompts", 'metrics["rollout/reward"]'),
    "backward": ("policy.set_gradient_accumulation_boundary", "policy.backward("),
    "evaluation": ('seed = ranks.seed_of(args.seed, iteration, "evaluate")', "scores = sampler."),
    "checkpoints": ("if done % args.save_every == 0", "logger.save(done"),
    "run": ("# ==== 7. run", "main(flags.parse(Args))"),
}
OTHERS = {  # the passages that a script has
    "restem.py": set(PASSAGES) - {"engine", "checkpoints"},
    "dpo_pos.py": set(PASSAGES) - {"sampling"},
    "sft.py": {"log-probs", "schedule", "engine", "backward", "checkpoints", "run"},
}


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


def synced(text: str, source: str, script: str) -> str:
    """The text of `script` with every shared section as it stands in `source`, the learning rate
    apart."""
    sections, passages = MORE.get(script, (set(), []))
    for name in passages:
        start, end = find_passage(source, name)
        source = source[:start] + text[slice(*find_passage(text, name))] + source[end:]
    own, shared = read_sections(text), read_sections(source)
    rate = LEARNING_RATE.search(own["2"])[0]
    shared["2"] = LEARNING_RATE.sub(rate, shared["2"])
    return "".join(own[name] if name in OWN | sections else shared[name] for name in own)


def find_passage(text: str, name: str) -> tuple[int, int]:
    """Where it stands: whole lines, the first that begins with its first line."""
    first, last = (re.escape(line) for line in PASSAGES[name])
    match = re.search(rf"^ *{first}(?:.*\n)*? *(?:\"\"\")?{last}.*\n", text, re.MULTILINE)
    assert match, f"the passage {name!r} ({PASSAGES[name][0]} ...) is missing"
    return match.span()


def read_passage(text: str, name: str) -> str:
    start, end = find_passage(text, name)
    return textwrap.dedent(text[start:end])


def synced_passages(text: str, source: str, names: set[str]) -> str:
    """`text` with these passages as they stand in `source`, indented as in `text`."""
    for name in names:
        start, end = find_passage(text, name)
        indent = re.match(" *", text[start:end])[0]
        text = text[:start] + textwrap.indent(read_passage(source, name), indent) + text[end:]
    return text


def count_differences(one: str, other: str) -> tuple[int, int]:
    """(rows that differ in `diff -y`, hunks of `diff`) of two texts."""
    matcher = difflib.SequenceMatcher(None, one.splitlines(), other.splitlines(), autojunk=False)
    changes = [code for code in matcher.get_opcodes() if code[0] != "equal"]
    return sum(max(i2 - i1, j2 - j1) for _, i1, i2, j1, j2 in changes), len(changes)


PAIRS = [("ppo.py", "vineppo.py"), ("grpo.py", "vineppo.py"), ("rloo.py", "vineppo.py")]
PAIRS += [("grpo.py", "rloo.py"), ("vineppo.py", "experiments/vineppo_cheap.py")]


def difference_table() -> str:
    """The README's table of the pairs."""
    rows = ["| | rows that differ | blocks | lines of each |", "|---|---|---|---|"]
    for pair in PAIRS:
        texts = [read_file(name) for name in pair]
        different, hunks = count_differences(*texts)
        lengths = " and ".join(str(len(text.splitlines())) for text in texts)
        rows.append(f"| `diff {' '.join(pair)}` | {different} | {hunks} | {lengths} |")
    return "\n".join(rows) + "\n"


def with_differences(text: str) -> str:
    """A page with its table of differences renewed."""
    marks = r"(<!-- differences -->\n).*?(<!-- end -->)"
    return re.sub(marks, lambda m: m[1] + difference_table() + m[2], text, flags=re.DOTALL)


def read_file(name: str) -> str:
    with open(os.path.join(ROOT, name), encoding="utf-8") as file:
        return file.read()


def main() -> None:
    source = read_file(SOURCE)

    def renew(name: str, after: str) -> None:
        if after != read_file(name):
            with open(os.path.join(ROOT, name), "w", encoding="utf-8") as file:
                file.write(after)
            print(f"{name}: brought in line")

    for name in COPIES:
        renew(name, synced(read_file(name), source, name))
    for name, passages in OTHERS.items():
        renew(name, synced_passages(read_file(name), source, passages))
    renew("README.md", with_differences(read_file("README.md")))


if __name__ == "__main__":
    main()
