# ruff: noqa: RUF001 (the equations have Greek letters)
"""The scripts side by side: a page with every pair of them, what differs beside its equation.

    python -m analysis.diff ppo vineppo                            writes runs/diff.html
    python -m analysis.diff ppo vineppo --picture docs/diff.png    and the README's picture

The page needs no network. It opens with the pair that is named; its two menus have the others.
"""

import difflib
import functools
import html
import itertools
import json
import os
import pathlib
import re
import shutil
import subprocess
import tempfile
from typing import Annotated

import tyro

from common import require
from tests.sync_scripts import COPIES, OTHERS, ROOT, SOURCE, read_file, read_sections

TEMPLATE = os.path.join(os.path.dirname(__file__), "diff.html")
NAMES = [path.removesuffix(".py") for path in (SOURCE, *COPIES, *OTHERS)]
SECTIONS = {"1", "2", "3", "4", "5", "6.6", "6.8", "7"}  # of each script
CHEAP = "experiments/vineppo_cheap"
UNSURE, TREE = "experiments/vineppo_unsure", "experiments/vineppo_tree"
SFT_LOSS = "L = - mean_y mean_t log π(y_t | y_{<t})"
VALUE_LOSS = "L_V = ½ mean_t max( (V_t - G_t)^2, (clip(V_t) - G_t)^2 )"
CRITIC = "V_t = critic(prompt, first t tokens of the response)"
# (script, section): (equations, a sentence); script "": for those without a note of their own.
NOTES = {
    ("", "0"): ("", "What the script computes, its commands, and the shapes of its tensors."),
    ("", "1"): ("", "What the script imports."),
    ("", "2"): ("", "The flags of sampling and of the update, with this script's defaults."),
    ("", "2 tail"): ("", "No flags of its own; a group of one response is refused."),
    ("vineppo", "2 tail"): ("K", "The number of rollouts from each state."),
    ("ppo", "2 tail"): ("γ, λ", "Discount and GAE factor; the critic's learning rate and clip."),
    (CHEAP, "2 tail"): (
        "K, smoothing",
        "The number of rollouts, which states get them, and how their noise is averaged.",
    ),
    (UNSURE, "2 tail"): ("K", "Rollouts from each state, and which tokens end a step."),
    (TREE, "2 tail"): ("K", "The number of rollouts from each state."),
    ("vineppo", "3"): (
        "A(i) = V(s_{i+1}) - V(s_i)",
        "Every token of reasoning step i gets the change in value over the step (paper, Eq. 6).",
    ),
    ("ppo", "3"): (
        "A_t = Σ_l (γλ)^l δ_{t+l},  δ_t = r_t + γ V_{t+1} - V_t\n" + VALUE_LOSS,
        "Generalized advantage estimation (Eq. 13 to 16), and the critic's loss (Eq. 11 and 12).",
    ),
    ("grpo", "3"): (
        "A = (R - mean(group)) / (std(group) + 10^{-8})",
        "Every token gets the reward's distance from the mean of its group, in standard deviations "
        "(DeepSeekMath, 4.1).",
    ),
    ("rloo", "3"): (
        "A = R - mean(rewards of the other G - 1)",
        "Every token gets the reward less the mean reward of the other responses to the prompt "
        "(Ahmadian et al.).",
    ),
    (CHEAP, "3"): (
        "A(i) = Σ_j smoothing^{|i-j|} (V(s_{j+1}) - V(s_j))",
        "A step also gets a share of the changes in value over its neighbours.",
    ),
    (UNSURE, "3"): (
        "A(i) = V(s_{i+1}) - V(s_i)",
        "Steps end after tokens that were sampled with a low probability, not at line ends.",
    ),
    (TREE, "3"): (
        "A = R - mean(siblings)\nweight of step j = 1 / (1 + K (j + 1))",
        "Rollouts are compared with all else that went on from their state, and trained on.",
    ),
    ("restem", "3"): ("", "The walk ends where accuracy does not rise (paper, App. C.5)."),
    ("dpo_pos", "3"): ("", "A pair is a right and a wrong response to one prompt."),
    ("sft", "3"): ("", "The targets: solutions, with EOS, behind their prompts."),
    ("", "4"): (
        "L = - min(ρ A, clip(ρ, 1 ± ε) A) + kl_coef · KL(policy, SFT checkpoint)",
        "ρ is a token's new probability divided by its old one (paper, App. A, Eq. 8 to 10).",
    ),
    (TREE, "4"): ("", "A response and its rollouts are one row, in which each prefix stands once."),
    ("restem", "4"): (SFT_LOSS, "The loss on right responses (Eq. 19, with the mean over tokens)."),
    ("dpo_pos", "4"): (
        "L = - mean log σ(β z),  z = d(y_w) - d(y_l) - λ max(0, - d(y_w))\n"
        "d(y) = log π(y) - log π_{ref}(y)",
        "A right response (w) gains on a wrong one (l); to become rarer costs it extra (Eq. 18).",
    ),
    ("sft", "4"): ("", "Log-probs and the learning rate; the loss stands in section 5."),
    ("", "5"): ("", "Problems, policy, sampler and reference model are set up."),
    ("restem", "5"): ("", "Problems, sampler and reference model; section 6.5 sets up the policy."),
    ("sft", "5"): (SFT_LOSS, "Problems and policy are set up; compute_loss is the equation."),
    ("ppo", "5b"): (CRITIC, "The critic is the SFT checkpoint with a scalar head."),
    ("", "5.1"): ("", "The run starts, or goes on from its newest checkpoint."),
    ("", "6.1"): ("", "Prompts are drawn, the same on every rank."),
    ("", "6.2"): ("", "The policy answers each prompt G times."),
    ("dpo_pos", "6.2"): ("", "Each prompt is answered G times, once in a run; answers are kept."),
    ("", "6.3"): ("", "The reward R is 1 for a right answer, else 0."),
    ("dpo_pos", "6.3"): ("", "Pairs are made, except for prompts that lack right or wrong ones."),
    ("", "6.4"): ("", "Log-probs of the responses; those of the sampler must be the same."),
    ("restem", "6.4"): ("data = {y: R(y) = 1}", "Only right responses are kept to learn from."),
    ("dpo_pos", "6.4"): ("", "The number of pairs gives the number of gradient steps."),
    ("vineppo", "6.5"): (
        "V(s) = 1/K Σ_k R(rollout_k),  rollout_k ~ π(· | s)",
        "A state's value is the mean reward of K fresh rollouts from it (paper, Eq. 5).",
    ),
    ("ppo", "6.5"): (
        CRITIC + ",  G_t = A_t + V_t",
        "One pass of the critic predicts the value of the state before each token.",
    ),
    ("grpo", "6.5"): (
        "baseline = mean(group)",
        "The rewards of the group give the advantages, which are normalised and not whitened.",
    ),
    ("rloo", "6.5"): (
        "baseline = mean(rewards of the other G - 1)",
        "The rewards of the group give the advantages, which are whitened.",
    ),
    (CHEAP, "6.5"): (
        "V(s_0) = (Σ_k R(rollout_k) + rewards of the other G - 1) / (K + G - 1)",
        "The equation is that of --reuse-responses; two more flags choose states for rollouts.",
    ),
    (UNSURE, "6.5"): (
        "V(s) = 1/K Σ_k R(rollout_k)",
        "As in vineppo, from the states after unsure tokens.",
    ),
    (TREE, "6.5"): (
        "row = response + K rollouts from each of its states",
        "The rollouts become part of the batch, with advantages of their own.",
    ),
    ("restem", "6.5"): ("", "The SFT checkpoint is loaded again, with a new optimizer."),
    ("", "6.6"): ("", "Log-probs of the reference model, then the gradient steps."),
    ("restem", "6.6"): ("", "Gradient steps on right responses, until accuracy does not rise."),
    ("dpo_pos", "6.6"): ("", "A gradient step on pairs; policy and reference share the passes."),
    ("sft", "6.6"): ("", "A gradient step on problems."),
    ("ppo", "6.6b"): (VALUE_LOSS, "The critic's step, on the same minibatch (Eq. 11 and 12)."),
    ("", "6.7"): ("", "The sampler gets the new weights."),
    ("restem", "6.7"): ("", "The sampler gets the weights of the chosen checkpoint."),
    ("", "6.8"): ("", "Metrics, evaluation on validation problems, checkpoints."),
}
OURS = {name for name, _ in NOTES if name}  # a reader's own copies have no notes


@functools.cache
def read_lines(name: str) -> list[tuple[str, str]]:
    """(section, line) of a script: so compared, no line matches one of another section."""
    sections = read_sections(read_file(f"{name}.py"))
    return [(section, line) for section, text in sections.items() for line in text.splitlines()]


def align(one: str, other: str) -> list[tuple[str, list]]:
    """[(section, blocks)]. A block is (i, j, n): n lines that are the same, from i and from j on;
    or a list of rows that differ: (i, j, marks in i, marks in j), where -1 is no line."""
    ours, theirs = read_lines(one), read_lines(other)
    names = [*read_sections(read_file("ppo.py")), *(name for name, _ in ours + theirs)]
    sections = sorted({*names}, key=lambda name: (name == "7", names.index(name)))
    blocks: dict[str, list] = {section: [] for section in sections}
    matcher = difflib.SequenceMatcher(None, ours, theirs, autojunk=False)
    for kind, i1, i2, j1, j2 in matcher.get_opcodes():
        for section in sections:
            a = {i: ours[i][1] for i in range(i1, i2) if ours[i][0] == section}
            b = {j: theirs[j][1] for j in range(j1, j2) if theirs[j][0] == section}
            if kind == "equal" and a:
                blocks[section].append((min(a), min(b), len(a)))
            elif a or b:
                rows = pair_lines(a, b)
                marked = [(i, j, *mark_words(a.get(i, ""), b.get(j, ""))) for i, j in rows]
                blocks[section].append(marked)
    return [(section, found) for section, found in blocks.items() if found]


def pair_lines(ours: dict[int, str], theirs: dict[int, str]) -> list[tuple[int, int]]:
    """Lines by number -> as many rows (i, j) as the longer side has lines. Each line of the shorter
    side stands beside one of the other, in order, so that their likenesses add up to the most."""
    if len(ours) > len(theirs):
        return [(i, j) for j, i in pair_lines(theirs, ours)]
    mine, yours = list(ours), list(theirs)
    # best[i][j]: the most for the first i of ours beside i of the first j of theirs
    best = [[0.0] * (len(yours) + 1) for _ in range(len(mine) + 1)]
    for i in range(1, len(mine) + 1):
        for j in range(i, len(yours) + 1):
            beside = best[i - 1][j - 1] + likeness(ours[mine[i - 1]], theirs[yours[j - 1]])
            best[i][j] = max(beside, best[i][j - 1]) if j > i else beside
    rows, i = [], len(mine)
    for j in range(len(yours), 0, -1):
        alone = i == 0 or (j > i and best[i][j] == best[i][j - 1])
        rows.append((-1 if alone else mine[i - 1], yours[j - 1]))
        i -= not alone
    return rows[::-1]


@functools.cache
def likeness(one: str, other: str) -> float:
    """Share of their words that two lines have in common; 0 where it is less than half."""
    words = [re.findall(r"\d[\w.-]*|\w+", line) for line in (one, other)]
    share = difflib.SequenceMatcher(None, *words).quick_ratio() if all(words) else 0.0
    return share if share >= 0.5 else 0.0


def mark_words(one: str, other: str) -> tuple[list, list]:
    """[start, end] of the words that differ, in each line; none where the lines are not alike."""
    if not likeness(one, other):
        return [], []
    lines = (one.rstrip("="), other.rstrip("="))  # a banner's last signs fill its line
    words = [list(re.finditer(r"^\s+|\d[\w.-]*|\w+|[^\w\s]", line)) for line in lines]
    texts = [[word[0] for word in line] for line in words]
    codes = difflib.SequenceMatcher(None, *texts, autojunk=False).get_opcodes()
    spans = [code[1:] for code in codes if code[0] != "equal"]
    ours = [[words[0][i1].start(), words[0][i2 - 1].end()] for i1, i2, _, _ in spans if i1 < i2]
    theirs = [[words[1][j1].start(), words[1][j2 - 1].end()] for *_, j1, j2 in spans if j1 < j2]
    return ours, theirs


def as_html(equations: str) -> str:
    """_x, _{...}, ^x and ^{...} as subscripts and superscripts."""
    text = html.escape(equations).replace("- ", "\u2212 ")
    for sign, tag in (("_", "sub"), (r"\^", "sup")):
        text = re.sub(rf"{sign}(?:{{(.*?)}}|(\w)(?!\w))", rf"<{tag}>\1\2</{tag}>", text)
    return text


def make_page(first: str, second: str) -> str:
    names = [*dict.fromkeys([*NAMES, first, second])]  # they may be copies of a reader's own
    data = {
        "first": [first, second],
        "ours": sorted(OURS),
        "lines": {name: [line for _, line in read_lines(name)] for name in names},
        "pairs": {f"{a} {b}": align(a, b) for a, b in itertools.product(names, repeat=2)},
        "notes": {" ".join(key): [as_html(eq), sentence] for key, (eq, sentence) in NOTES.items()},
    }
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
    return pathlib.Path(TEMPLATE).read_text(encoding="utf-8").replace("{{data}}", text)


def take_picture(page: str, picture: str) -> None:
    """Section 6.5, as if the sections before it had been scrolled away."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    require(browser, "--picture: no chromium or google-chrome on this machine to draw it")
    hidden = "section:has(~ section > [id='6.5']) { display: none }</style>"
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    command += ["--window-size=1400,1000", f"--screenshot={os.path.abspath(picture)}"]
    with tempfile.TemporaryDirectory() as folder:
        copy = pathlib.Path(folder, "diff.html")
        copy.write_text(page.replace("</style>", hidden), encoding="utf-8")
        command += [f"--user-data-dir={folder}/profile", copy.as_uri()]
        subprocess.run(command, check=True, stderr=subprocess.DEVNULL)


def main(
    a: Annotated[str, tyro.conf.Positional] = "ppo",
    b: Annotated[str, tyro.conf.Positional] = "vineppo",
    output: str = "runs/diff.html",
    picture: str = "",
) -> None:
    names = [name.removesuffix(".py") for name in (a, b)]
    for name in names:
        exists = os.path.exists(os.path.join(ROOT, f"{name}.py"))
        require(exists, f"{name}: no such script; there are {', '.join(NAMES)}, and your copies")
        missing = SECTIONS - {section for section, _ in read_lines(name)}
        require(not missing, f"{name}.py: no copy of a script, without sections {sorted(missing)}")
    require(not os.path.isdir(output), f"--output {output}: a folder; name a file")
    os.makedirs(os.path.dirname(os.path.abspath(output)), exist_ok=True)
    page = make_page(*names)
    pathlib.Path(output).write_text(page, encoding="utf-8")
    print(output)
    if picture:
        take_picture(page, picture)
        print(picture)


if __name__ == "__main__":
    tyro.cli(main)
