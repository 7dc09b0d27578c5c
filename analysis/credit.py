"""Credit, step by step: the advantages that VinePPO, PPO and GRPO give to the same response.

    python -m analysis.credit --run runs/vineppo-chain-seed1
    python -m analysis.credit --run runs/vineppo-chain-seed1 --critic runs/ppo-chain-seed1

(Paper, Figures 1 and H.27 to H.29.) The run's newest checkpoint answers a few training prompts,
with K rollouts from each state. Three responses are shown, in the terminal and as an HTML page that
needs no network: the right one with the largest gain in a step, the wrong one with the largest
loss, and one at random. Advantages are those of the scripts, before whitening:

    VinePPO   V(s_{i+1}) - V(s_i), measured
    PPO       the mean over the step's tokens of its advantage (R - V_t if gamma = lambda = 1)
    GRPO      (R - mean) / std of the group, the same for each step
"""

import html
import os
import random
import sys
from dataclasses import dataclass

import torch
import tyro

import grpo
import ppo
import vineppo
from analysis import values
from common import flags, ranks, require, steps
from common.batches import Batch


@dataclass
class Args:
    run: str
    """folder of the run whose newest checkpoint answers"""
    critic: str = ""
    """folder of a run of ppo.py from the same SFT checkpoint, to show PPO's credit too; not needed
    where --run is a run of ppo.py"""
    num_prompts: int = 8
    """training prompts that are answered"""
    k: int = 9
    """rollouts per state"""
    seed: int = 1
    """decides all that is drawn at random"""
    output: str = ""
    """the page to write; empty: credit.html in the run's folder"""


@torch.no_grad()
def give_credit(
    prober: values.Prober, problems, prompts, cap: int = 0, gae: tuple[float, float] = (1.0, 1.0)
) -> list[dict]:
    """All responses to the prompts, G in a row for each: prompt, answer, reward and steps, each
    with its text, value (VinePPO's), critic (PPO's, of the state it starts in) and advantages.
    `cap`: --max-steps-valued of vineppo_cheap.py; `gae`: --gamma and --gae-lambda of ppo.py."""
    args = prober.args
    seeds = (ranks.seed_of(args.seed, name) for name in ("responses", "rollouts"))
    groups = prober.roll_out(prompts, [[]] * len(prompts), args.group_size, next(seeds))
    rows = [
        (problem, prompt, sample.ids, reward)
        for problem, prompt, group in zip(problems, prompts, groups, strict=True)
        for sample, reward in zip(group, prober.grade([], group, problem.answer), strict=True)
    ]
    require(all(ids for *_, ids, _ in rows), "a response is empty, so it has no steps")
    ends = [steps.split_steps(ids, prober.tokenizer, prober.task.step_rule) for *_, ids, _ in rows]
    ends = [of_row[:-1][: cap - 1] + of_row[-1:] if cap else of_row for of_row in ends]
    starts = [[0, *of_row[:-1]] for of_row in ends]
    states: dict[tuple, int] = {}  # equal ones once, as vineppo.py shares them -> a row
    visited = [
        [(*prompt, -1, *ids[:start]) for start in of_row]
        for (_, prompt, ids, _), of_row in zip(rows, starts, strict=True)
    ]
    for row, of_row in enumerate(visited):
        for state in of_row:
            states.setdefault(state, row)
    prefixes = [list(state[state.index(-1) + 1 :]) for state in states]
    groups = prober.roll_out(
        [rows[row][1] for row in states.values()], prefixes, args.k, next(seeds)
    )
    value_of = {}
    for (state, row), prefix, group in zip(states.items(), prefixes, groups, strict=True):
        value_of[state] = sum(prober.grade(prefix, group, rows[row][0].answer)) / args.k
    measured = [[value_of[state] for state in of_row] for of_row in visited]

    rewards = torch.tensor([reward for *_, reward in rows])
    device = getattr(prober.critic, "device", "cpu")
    batch = Batch([prompt for _, prompt, *_ in rows], [ids for *_, ids, _ in rows], 0, device)
    inputs = batch.take(list(range(len(rows))))
    mask = batch.response_mask
    advantages = {"VinePPO": vineppo.compute_advantages(rewards, measured, ends, mask)}
    if prober.critic is not None:
        learnt = ppo.compute_values(prober.critic, *inputs).cpu()  # (B, T)
        advantages["PPO"] = ppo.compute_advantages(rewards, learnt, mask, *gae)
    advantages["GRPO"] = grpo.compute_advantages(rewards, args.group_size, mask)
    episodes = []
    for row, (problem, _, response, reward) in enumerate(rows):
        texts = steps.step_texts(response, ends[row], prober.tokenizer)
        shown = []
        for i, (start, end) in enumerate(zip(starts[row], ends[row], strict=True)):
            step = {"text": texts[i], "value": measured[row][i]}
            if prober.critic is not None:
                step["critic"] = learnt[row, start].item()
            step |= {name: a[row, start:end].mean().item() for name, a in advantages.items()}
            shown.append(step)
        episode = {"prompt": problem.prompt, "answer": problem.answer, "reward": reward}
        episodes.append({**episode, "steps": shown})
    return episodes


def choose(episodes: list[dict], seed: int) -> dict[str, dict]:
    """{title: response} to show, without titles that no response fits."""
    chosen = {}
    right = [e for e in episodes if e["reward"] == 1]
    wrong = [e for e in episodes if e["reward"] != 1]
    if right:
        most = max(right, key=lambda e: max(step["VinePPO"] for step in e["steps"]))
        chosen["right: the step that gained most"] = most
    if wrong:
        least = min(wrong, key=lambda e: min(step["VinePPO"] for step in e["steps"]))
        chosen["wrong: the step that lost most"] = least
    chosen["any"] = random.Random(seed).choice(episodes)
    return chosen


# ---- showing it ----------------------------------------------------------------------------------


def columns(episode: dict) -> dict[str, str]:
    """{column beside a step: format of its numbers}."""
    formats = {"value": ".2f", "VinePPO": "+.2f", "critic": ".2f", "PPO": "+.2f", "GRPO": "+.2f"}
    return {name: form for name, form in formats.items() if name in episode["steps"][0]}


def visible(text: str) -> str:
    """Line ends as a sign, other control characters and lone surrogates as escapes, so that a
    model's text cannot disturb the terminal."""
    signs = {"\n": "\u23ce", "\t": "\u2192"}
    return "".join(
        c if c.isprintable() else signs.get(c, c.encode("unicode_escape").decode()) for c in text
    )


def colour(advantage: float) -> tuple[int, int, int]:
    """White at 0, blue at +1, orange at -1, which colour-blind readers can tell apart."""
    end = (0, 114, 178) if advantage > 0 else (213, 94, 0)
    share = min(1.0, abs(advantage)) * 0.75
    return tuple(round(255 + (part - 255) * share) for part in end)


def as_text(title: str, episode: dict, coloured: bool) -> str:
    lines = [f"== {title} ==", visible(episode["prompt"])]
    lines.append("".join(f"{name:>9}" for name in columns(episode)) + "  step")
    for step in episode["steps"]:
        text = visible(step["text"])
        if coloured:
            background = ";".join(map(str, colour(step["VinePPO"])))
            text = f"\x1b[48;2;{background};38;2;0;0;0m{text}\x1b[0m"
        numbers = (f"{step[name]:{form}}".rjust(9) for name, form in columns(episode).items())
        lines.append("".join(numbers) + f"  {text}")
    return "\n".join([*lines, f"reward {episode['reward']:g}"]) + "\n"


STYLE = """body{font:15px/1.5 sans-serif;max-width:62em;margin:2em auto;padding:0 1em;color:#111}
table{border-collapse:collapse;margin:1em 0}td,th{padding:.25em .6em;text-align:right}
td:first-child,th:first-child{text-align:left;white-space:pre-wrap;overflow-wrap:anywhere}
pre{white-space:pre-wrap;background:#f4f4f4;padding:.6em}"""


def as_page(chosen: dict[str, dict], source: str) -> str:
    """A page without scripts and links; all that a model or a file wrote is escaped."""

    def escaped(text: str) -> str:
        return html.escape(visible(text))

    def cell(text: str, advantage: float | None) -> str:
        style = "" if advantage is None else f' style="background:rgb{colour(advantage)}"'
        return f"<td{style}>{text}</td>"

    parts = [f"<h1>Credit, step by step</h1><p>{escaped(source)}</p>"]
    parts.append("<p>Blue: the step made a right answer likelier; orange: less likely.</p>")
    for title, episode in chosen.items():
        names = columns(episode)
        parts.append(f"<h2>{escaped(title)}</h2><pre>{escaped(episode['prompt'])}</pre>")
        parts.append(f"<p>reward {episode['reward']:g}, answer {escaped(episode['answer'])}</p>")
        head = "".join(f"<th>{name}</th>" for name in names)
        parts.append(f"<table><tr><th>step</th>{head}</tr>")
        for step in episode["steps"]:
            cells = [cell(escaped(step["text"]), step["VinePPO"])]
            for name, form in names.items():
                is_value = name in ("value", "critic")
                cells.append(cell(f"{step[name]:{form}}", None if is_value else step[name]))
            parts.append(f"<tr>{''.join(cells)}</tr>")
        parts.append("</table>")
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Credit</title>'
        f"<style>{STYLE}</style></head><body>{''.join(parts)}</body></html>\n"
    )


def main(args: Args) -> None:
    flags.check(args)
    settings = values.Args(num_prompts=args.num_prompts, k=args.k, seed=args.seed)
    settings, checkpoints, saved = values.read_run(args.run, settings)
    critic, of_critic = "", saved
    if args.critic:
        _, found, of_critic = values.read_run(args.critic, settings)
        same = all(of_critic.get(name) == saved[name] for name in ("model", "task"))
        require(
            of_critic["script"] == "ppo" and same,
            f"--critic {args.critic}: no run of ppo.py from {saved['model']} on {saved['task']}",
        )
        critic = os.path.join(os.path.dirname(found[max(found)]), "critic_hf/model.safetensors")
        require(os.path.exists(critic), f"--critic {args.critic}: {critic} is missing")
    model = checkpoints[max(checkpoints)]
    prober, problems, prompts = values.set_up(settings, model)
    prober.use(model, critic)
    gae = of_critic.get("gamma", 1.0), of_critic.get("gae_lambda", 1.0)
    episodes = give_credit(prober, problems, prompts, saved.get("max_steps_valued", 0), gae)
    chosen = choose(episodes, args.seed)
    for title, episode in chosen.items():
        print(as_text(title, episode, coloured=sys.stdout.isatty()))
    output = args.output or os.path.join(args.run, "credit.html")
    with open(output, "w", encoding="utf-8") as file:
        file.write(as_page(chosen, f"{model}, K = {args.k}"))
    print(output)


if __name__ == "__main__":
    main(tyro.cli(Args))
