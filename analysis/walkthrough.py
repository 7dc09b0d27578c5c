"""One iteration of vineppo.py, told with the numbers of a real run: docs/walkthrough.md, and the
picture of the idea, docs/idea.svg.

    python -m analysis.walkthrough --critic runs/ppo-chain-seed1

The script itself runs, engines and all; this file writes down what its functions get and return.
The page follows the wrong response in which a single step lost most, beside a right one to the same
prompt. It computes the loss of a minibatch once more, token by token, in plain Python.
"""

import functools
import math
import os
import re
import time
from dataclasses import dataclass
from types import SimpleNamespace

import torch
import tyro
from transformers import AutoModelForCausalLM, AutoTokenizer

import grpo
import ppo
import rloo
import vineppo
from analysis import idea, values
from analysis.compare import table
from analysis.credit import visible
from analysis.curves import read_metrics
from analysis.exact import read_digits
from common import require, run, sampling, steps
from common.batches import Batch
from tasks.chain import apply_operation


@dataclass
class Args:
    model: str = "runs/sft/hf"
    """the checkpoint that sft.py made"""
    critic: str = "runs/ppo-chain-seed1"
    """folder of a run of ppo.py from that checkpoint: its critic judges the same response"""
    k: int = 3
    """rollouts per state: few, so that the page can show them"""
    seed: int = 1
    output_dir: str = ""
    """the run's folder; default runs/walkthrough-<time>"""
    page: str = "docs/walkthrough.md"
    picture: str = "docs/idea.svg"


# ---- the run -------------------------------------------------------------------------------------


def spy(owner, name: str) -> list[tuple]:
    """From now on each call of owner.name is kept: (arguments, options, result)."""
    function, calls = getattr(owner, name), []

    @functools.wraps(function)
    def watched(*arguments, **options):
        result = function(*arguments, **options)
        calls.append((arguments, options, result))
        return result

    setattr(owner, name, watched)
    return calls


def run_one_iteration(args: Args) -> SimpleNamespace:
    """Runs vineppo.py; what it had of all B responses, and of the gradient steps of its update."""
    generated, graded = spy(sampling.Sampler, "generate"), spy(vineppo.grading, "grade_all")
    credited, whitened = spy(vineppo, "compute_advantages"), spy(vineppo, "whiten")
    losses, checked = spy(vineppo, "compute_policy_loss"), spy(run.Run, "check")
    settings = vineppo.Args(model=args.model, k=args.k, seed=args.seed, num_iterations=1)
    settings.eval_every, settings.output_dir = 0, args.output_dir
    vineppo.main(settings)

    (_, prompts), _, groups = generated[0]
    (_, states), _, rollouts = generated[1]
    correct = iter(graded[1][2])
    outcomes = {
        tuple(state): [(sample.ids, next(correct)) for sample in group]
        for state, group in zip(states, rollouts, strict=True)
    }
    (rewards, step_values, step_ends, mask), _, advantages = credited[0]
    return SimpleNamespace(
        settings=settings,
        prompts=[prompt for prompt in prompts for _ in range(settings.group_size)],
        responses=[sample.ids for group in groups for sample in group],
        answers=graded[0][0][2],
        rollouts=outcomes,  # {prompt and response so far: [(ids, reward)]}
        rewards=rewards,
        step_values=step_values,
        step_ends=step_ends,
        mask=mask,
        advantages=advantages,
        whitened=whitened[0][2],
        old=checked[0][1]["old_logprobs"],
        ref=checked[0][1]["ref_logprobs"],
        losses=losses,
        metrics=read_metrics(args.output_dir)[0],
    )


def choose(walk: SimpleNamespace) -> tuple[int, int]:
    """Rows of a wrong and a right response to one prompt: of those wrong ones whose state was right
    in each rollout before a step and in none behind it, the first; else the largest drop."""
    size, found = walk.settings.group_size, []
    for row, (reward, measured) in enumerate(zip(walk.rewards, walk.step_values, strict=True)):
        group = range(row // size * size, row // size * size + size)
        right = [other for other in group if walk.rewards[other] == 1]
        drop = min(b - a for a, b in zip(measured, [*measured[1:], 0.0], strict=True))
        if reward == 0 and right and drop < 0:
            found.append((drop, row, right[0]))
    what = "no prompt has a right response and a wrong one with a step that lost"
    require(found, f"--seed {walk.settings.seed}: {what}")
    return min(found)[1:]


def pick_gradient_step(walk: SimpleNamespace, row: int) -> tuple[int, int, list[torch.Tensor]]:
    """The last gradient step that has this row in one pass of all its minibatch: its number, the
    row's place in it, and what compute_policy_loss got, with the loss behind it."""
    length = len(walk.responses[row])
    for number in reversed(range(len(walk.losses))):
        arguments, _, (loss, _) = walk.losses[number]
        for place, old in enumerate(arguments[1]):
            if torch.equal(old[:length].cpu(), walk.old[row, :length]):
                whole = len(arguments[1]) == walk.settings.minibatch_size
                require(whole, "a minibatch took several passes: more --micro-batch-tokens, please")
                parts = [x.detach().cpu() if isinstance(x, torch.Tensor) else x for x in arguments]
                return number, place, [*parts, loss.detach()]
    raise AssertionError("a response is in no minibatch")


# ---- the same numbers, by hand -------------------------------------------------------------------


def explain_token(new: float, old: float, ref: float, advantage: float, clip: float) -> dict:
    """One token of compute_policy_loss (section 4), without tensors."""
    ratio = math.exp(new - old)
    clipped = min(max(ratio, 1 - clip), 1 + clip)
    taken = min(ratio * advantage, clipped * advantage)
    return {
        "old": old,
        "new": new,
        "ratio": ratio,
        "advantage": advantage,
        "taken": taken,
        "kl": min(math.exp(ref - new) - (ref - new) - 1, 10.0),
    }


def add_up(parts: list) -> float:
    """The loss of a whole minibatch, token by token."""
    new, old, ref, advantages, mask, num_tokens, num_responses, clip, kl_coef, _ = parts
    surrogate = kl = 0.0
    for r, t in mask.nonzero().tolist():
        numbers = (x[r, t].item() for x in (new, old, ref, advantages))
        token = explain_token(*numbers, clip)
        surrogate, kl = surrogate + token["taken"], kl + token["kl"]
    return -surrogate / num_tokens + kl_coef * kl / num_responses


@torch.no_grad()
def find_logprobs(
    folder: str, prompt: list[int], ids: list[int], temperature: float
) -> list[float]:
    """Of the response's tokens, from the logits of a saved checkpoint as transformers loads it."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    logits = model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1] / temperature
    return logits.log_softmax(-1)[range(len(ids)), ids].tolist()


@torch.no_grad()
def ask_critic(folder: str, walk: SimpleNamespace, row: int, tokenizer) -> tuple:
    """PPO's values and advantages of the response's tokens, by the critic of that run, and for how
    many iterations it had learnt."""
    settings, found, saved = values.read_run(folder, values.Args())
    require(saved["script"] == "ppo", f"--critic {folder}: a run of {saved['script']}.py")
    newest = found[max(found)]
    weights = f"{os.path.dirname(newest)}/critic_hf/model.safetensors"
    critic = values.load_critic(settings, tokenizer, newest, weights)
    batch = Batch([walk.prompts[row]], [walk.responses[row]], 0, torch.device("cpu"))
    learnt = ppo.compute_values(critic, *batch.take([0]))
    gae = saved["gamma"], saved["gae_lambda"]
    given = ppo.compute_advantages(walk.rewards[[row]], learnt, batch.response_mask, *gae)
    return learnt[0].tolist(), given[0].tolist(), max(found)


# ---- the page ------------------------------------------------------------------------------------


def make_facts(args: Args) -> SimpleNamespace:
    """All that the page says of the run, as plain numbers and texts."""
    walk = run_one_iteration(args)
    tokenizer, settings = AutoTokenizer.from_pretrained(args.model), walk.settings
    row, right = choose(walk)
    prompt, ids, ends = walk.prompts[row], walk.responses[row], walk.step_ends[row]
    starts, measured = [0, *ends[:-1]], walk.step_values[row]
    changes = [walk.advantages[row, start].item() for start in starts]
    worst = changes.index(min(changes))

    def read_rollouts(start: int) -> list[tuple[str, float]]:
        """How each rollout from the state went on, and its reward."""
        return [
            (tokenizer.decode(more, skip_special_tokens=True), reward)
            for more, reward in walk.rollouts[(*prompt, *ids[:start])]
        ]

    update, place, parts = pick_gradient_step(walk, row)
    new, old, ref, given = (x[place].tolist() for x in parts[:4])
    after = find_logprobs(f"{args.output_dir}/hf", prompt, ids, settings.temperature)
    learnt, learnt_advantages, iterations = ask_critic(args.critic, walk, row, tokenizer)
    first = row // settings.group_size * settings.group_size
    group = slice(first, first + settings.group_size)
    of_group = [walk.rewards[group], settings.group_size, walk.mask[group]]
    spans = list(zip(starts, ends, strict=True))
    return SimpleNamespace(
        settings=settings,
        metrics=walk.metrics,
        prompt=tokenizer.decode(prompt),
        answer=walk.answers[row],
        texts=steps.step_texts(ids, ends, tokenizer),
        right_texts=steps.step_texts(walk.responses[right], walk.step_ends[right], tokenizer),
        reward=walk.rewards[row].item(),
        rewards=walk.rewards[group].tolist(),
        values=measured,
        advantages=changes,
        worst=worst,
        rollouts=[read_rollouts(start) for start in starts],
        mean=walk.advantages[walk.mask.bool()].mean().item(),
        spread=(walk.advantages[walk.mask.bool()].var() + 1e-8).sqrt().item(),
        num_tokens=int(walk.mask.sum()),
        whitened=[walk.whitened[row, start].item() for start in starts],
        update=update,
        tokens=[
            {"text": tokenizer.decode([ids[t]]), "after": math.exp(after[t]), "step": step}
            | explain_token(new[t], old[t], ref[t], given[t], settings.clip_coef)
            for step, (start, end) in enumerate(spans)
            for t in range(start, end)
        ],
        loss=parts[-1].item(),
        loss_by_hand=add_up(parts),
        minibatch_tokens=parts[5],
        critic=[learnt[start] for start in starts],
        ppo=[sum(learnt_advantages[a:b]) / (b - a) for a, b in spans],
        grpo=grpo.compute_advantages(*of_group)[row - first, 0].item(),
        rloo=rloo.compute_advantages(*of_group)[row - first, 0].item(),
        iterations=iterations,
    )


def read_equation(step: str) -> tuple[str, int, int] | None:
    """The sum, what it should be and what it is said to be, in a step of the embedded task."""
    found = re.search(r"(\d)([+-])(\d)=(\d)", step)
    if not found:
        return None
    digit, op, operand, result = found.groups()
    return f"{digit}{op}{operand}", apply_operation(int(digit), op, int(operand)), int(result)


def find_mistake(step: str) -> str:
    equation = read_equation(step)
    if not equation:
        return "it ends the response with a wrong answer"
    what, right, result = equation
    if right == result:
        return "its equation is right, but from here the policy fails"
    return f"modulo 10, {what} is {right} and not {result}"


def find_chance(f: SimpleNamespace) -> str:
    """Which advantages must be noise: a right step, as long as no wrong one came before it, cannot
    make a right answer less likely."""
    found = []
    is_chain = read_digits(f.prompt, f.texts) is not None  # its sums are those of the prompt
    for i, (text, advantage) in enumerate(zip(f.texts, f.advantages, strict=True)):
        equation = read_equation(text) if is_chain else None
        if not equation or equation[1] != equation[2]:
            break
        found += [str(i + 1)] if advantage < 0 else []
    if not found:
        return ""
    which = "Step " if len(found) == 1 else "Steps "
    what = (
        " is correct; its negative advantage is"
        if len(found) == 1
        else (" are correct; their negative advantages are")
    )
    return f"{which}{' and '.join(found)}{what} chance. "


def code(text: str) -> str:
    return f"`{visible(text)}`"


def fill_page(f: SimpleNamespace, command: str) -> str:
    """analysis/walkthrough.md with the run's numbers. Its sentences hold for each response that
    `choose` can choose."""
    size, k, worst, count = f.settings.group_size, f.settings.k, f.worst, len(f.texts)
    num_responses, num_right = f.settings.num_prompts * size, round(sum(f.rewards))
    num_updates = f.settings.update_epochs * num_responses // f.settings.minibatch_size

    def in_line(texts: list[str], i: int) -> str:
        return code(texts[i]) if i < len(texts) else ""

    def list_rollouts(state: int) -> str:
        rows = [
            [str(i), code(text), f"{reward:.0f}"]
            for i, (text, reward) in enumerate(f.rollouts[state], start=1)
        ]
        return table(["rollout", "how it goes on", "reward"], rows)

    behind, value_behind = "After it the response has ended, with R = 0.\n", "R = 0"
    if worst + 1 < count:
        behind = f"From the state after it:\n\n{list_rollouts(worst + 1)}"
        value_behind = f"V(s{worst + 1}) = {f.values[worst + 1]:.2f}"

    def moved(token: dict) -> float:
        return abs(math.log(token["ratio"]))

    of_step = [token for token in f.tokens if token["step"] == worst]
    others = [token for token in f.tokens if token["step"] != worst]
    before = math.prod(math.exp(token["old"]) for token in of_step)
    three = [*sorted(of_step, key=moved)[-2:], max(others, key=moved)]
    loss_rows = [
        [
            f"{code(t['text'])} of step {t['step'] + 1}",
            *(f"{t[name]:+.4f}" for name in ("old", "new")),
            f"{t['ratio']:.4f}",
            *(f"{t[name]:+.4f}" for name in ("advantage", "taken")),
            f"{t['kl']:.1e}" if t["kl"] < 10 else "10 (its limit)",
        ]
        for t in three
    ]
    with open(os.path.join(os.path.dirname(__file__), "walkthrough.md"), encoding="utf-8") as file:
        page = file.read()
    return page.format(
        command=command,
        prompt=visible(f.prompt),
        answer=f.answer,
        num_prompts=f.settings.num_prompts,
        size=size,
        others=size - 1,
        num_responses=num_responses,
        responses=table(
            ["step", "a wrong response", "a right response"],
            [
                [str(i + 1), in_line(f.texts, i), in_line(f.right_texts, i)]
                for i in range(max(count, len(f.right_texts)))
            ],
        ),
        all_right=round(f.metrics["rollout/reward"] * num_responses),
        reward=f"{f.metrics['rollout/reward']:.3f}",
        count=count,
        k=k,
        worst=worst,
        number=worst + 1,
        rollouts=list_rollouts(worst),
        value=f"{f.values[worst]:.2f}",
        step=code(f.texts[worst]),
        mistake=find_mistake(f.texts[worst]),
        behind=behind,
        value_behind=value_behind,
        credit=table(
            ["state", "its value", "step", "advantage"],
            [
                [f"s{i}", f"{f.values[i]:.2f}", code(text), f"{f.advantages[i]:+.2f}"]
                for i, text in enumerate(f.texts)
            ],
        ),
        promised=f"{sum(f.advantages):+.2f}",
        chance=find_chance(f),
        advantage=f"{f.advantages[worst]:+.2f}",
        num_tokens=f"{f.num_tokens:,}",
        mean=f"{f.mean:+.6f}",
        spread=f"{f.spread:.6f}",
        whitened=f"{f.whitened[worst]:+.4f}",
        minibatch_size=f.settings.minibatch_size,
        num_updates=num_updates,
        update=f.update + 1,
        updates_before=f.update,
        losses=table(["token", "old", "new", "ratio", "advantage", "taken", "KL"], loss_rows),
        low=f"{1 - f.settings.clip_coef:g}",
        high=f"{1 + f.settings.clip_coef:g}",
        minibatch_tokens=f"{f.minibatch_tokens:,}",
        kl_coef=f"{f.settings.kl_coef:g}",
        loss_by_hand=f"{f.loss_by_hand:.6f}",
        loss=f"{f.loss:.6f}",
        moved=table(
            ["token", "before the update", "after it"],
            [[code(t["text"]), f"{math.exp(t['old']):.4f}", f"{t['after']:.4f}"] for t in of_step],
        ),
        compared=table(
            ["step", "VinePPO", "critic's value", "PPO (mean)", "GRPO", "RLOO"],
            [
                [
                    code(text),
                    f"{f.advantages[i]:+.2f}",
                    f"{f.critic[i]:.2f}",
                    *(f"{x:+.2f}" for x in (f.ppo[i], f.grpo, f.rloo)),
                ]
                for i, text in enumerate(f.texts)
            ],
        ),
        less="less" if math.prod(t["after"] for t in of_step) < before else "more",
        num_right=num_right,
        rloo=f"{f.rloo:+.2f}",
        iterations=f.iterations,
    )


def main(args: Args) -> None:
    args.output_dir = args.output_dir or f"runs/walkthrough-{time.strftime('%Y%m%d-%H%M%S')}"
    critic = os.path.join(args.critic, "args.json")
    require(os.path.exists(critic), f"--critic {args.critic}: no run is there (python ppo.py)")
    facts = make_facts(args)
    words = {"--model": args.model, "--critic": args.critic, "--k": args.k, "--seed": args.seed}
    standard = {"--model": Args.model, "--critic": Args.critic, "--k": Args.k, "--seed": Args.seed}
    flags = [f"{name} {word}" for name, word in words.items() if word != standard[name]]
    command = " ".join([".venv/bin/python -m analysis.walkthrough", *flags])
    with open(args.page, "w", encoding="utf-8") as file:
        file.write(fill_page(facts, command))
    with open(args.picture, "w", encoding="utf-8") as file:
        file.write(idea.draw(facts))
    print(args.page, args.picture)


if __name__ == "__main__":
    main(tyro.cli(Args))
