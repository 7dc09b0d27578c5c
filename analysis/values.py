"""How close are an estimator's values of states to the truth? (Paper, section 7 and appendix G.)

    python -m analysis.values --run runs/ppo-chain-seed1            the checkpoints of a run
    python -m analysis.values --model CHECKPOINT --task gsm8k       any checkpoint

The checkpoint answers training prompts. The states are the starts of the reasoning steps in its
responses. The truth of a state is the mean reward of 256 rollouts from it. Compared with it:

    vineppo   the mean reward of K other rollouts
    ppo       the critic that was trained with the checkpoint, where there is one
    grpo      the mean reward of the G responses to its prompt (for each of their states)
    rloo      the same without the response's own reward

Most of the variance of values is the difficulty of the problem. So the explained variance is also
given within problems, with each prompt's mean removed.

Top action: five next steps are sampled from a state, at least three of them distinct. Does the
estimator find the best? On the embedded task, the truth is compared with exact values too.
"""

import dataclasses
import glob
import json
import os
import random
import statistics
from dataclasses import dataclass

import torch

import mathequal
import ppo
from analysis.exact import exact_values, read_digits
from common import data, engines, flags, grading, ranks, require, sampling, steps

CLOSE = 0.05  # a value this close to the truth is right (section 7)
ESTIMATORS = ("vineppo", "ppo", "grpo", "rloo")


@dataclass
class Args(flags.Model, flags.Sampler):
    run: str = ""
    """folder of a run, whose checkpoints and settings are used; results go to its values/"""
    iterations: tuple[int, ...] = ()
    """which of the run's checkpoints; empty: all"""
    num_prompts: int = 16
    """prompts, each with a group of responses, from which the states are drawn"""
    num_states: int = 64
    """states whose values are compared"""
    num_actions: int = 16
    """states from which five next steps are sampled; 0: none"""
    truth: int = 256
    """rollouts whose mean reward is the truth of a state"""
    k: int = 9
    """rollouts of VinePPO's estimate"""
    gpu_memory_utilization: float = 0.4
    """share of a GPU's memory for vLLM; lower it when memory runs out"""

    # without --run (with it, these settings and the task are the run's)
    model: str = ""
    """a checkpoint folder, or a name on the hub"""
    output: str = "values.json"
    """JSON file for the results"""
    group_size: int = 8
    """responses sampled for each prompt"""
    temperature: float = 0.6
    """logits are divided by this; higher: more varied responses"""
    top_p: float = 1.0
    """nucleus sampling: only the likeliest tokens of this total probability; 1: all tokens"""
    max_response_len: int = 80
    """most tokens of a response, the end token EOS included; one that is cut off has reward 0"""


# ---- measures ------------------------------------------------------------------------------------


def measure(truth: list[float], predicted: list[float]) -> dict[str, float]:
    """Mean absolute error, share within 0.05 (a tie with the bound counts), and explained variance
    1 - Var(truth - predicted) / Var(truth), NaN where all truths are equal."""
    errors = [t - p for t, p in zip(truth, predicted, strict=True)]
    variance = statistics.pvariance(truth)
    return {
        "mae": statistics.mean(map(abs, errors)),
        "close": statistics.mean(abs(e) <= CLOSE + 1e-9 for e in errors),
        "explained": 1 - statistics.pvariance(errors) / variance if variance else float("nan"),
    }


def within_problems(states: list[dict], estimator: str) -> float:
    """Explained variance with the mean of each prompt's states removed, from truth and prediction
    alike. Most of a value's variance is the problem's difficulty; credit is what is left. 0 for
    GRPO, which gives all states of a prompt one value; NaN where no prompt has two truths."""
    squares = [0.0, 0.0]  # of the truths, of the errors
    for of_prompt in group_by_prompt(states):
        truths = [state["truth"] for state in of_prompt]
        errors = [state["truth"] - state[estimator] for state in of_prompt]
        for i, numbers in enumerate((truths, errors)):
            squares[i] += statistics.pvariance(numbers) * len(numbers)
    return 1 - squares[1] / squares[0] if squares[0] else float("nan")


def ceilings(states: list[dict], rollouts: int) -> tuple[float, float]:
    """The explained variance that exact values would have, over all states and within problems: a
    truth is the mean of `rollouts` rollouts, and has a variance of its own (unbiased estimate)."""
    found = []
    for groups in ([states], group_by_prompt(states)):
        squares = noise = 0.0
        for group in groups:
            truths = [state["truth"] for state in group]
            squares += statistics.pvariance(truths) * len(truths)
            of_truths = sum(t * (1 - t) / (rollouts - 1) for t in truths)
            noise += of_truths * (1 - 1 / len(truths))  # a mean takes some of it with it
        found.append(1 - noise / squares if squares else float("nan"))
    return found[0], found[1]


def group_by_prompt(states: list[dict]) -> list[list[dict]]:
    groups: dict[str, list[dict]] = {}
    for state in states:
        groups.setdefault(state["prompt"], []).append(state)
    return [*groups.values()]


def error_by_position(states: list[dict], estimator: str) -> list[float]:
    """Mean absolute error by tenths of the response (step / steps); NaN where there is no state."""
    tenths: list[list[float]] = [[] for _ in range(10)]
    for state in states:
        error = abs(state["truth"] - state[estimator])
        tenths[10 * state["step"] // state["steps"]].append(error)
    return [statistics.mean(errors) if errors else float("nan") for errors in tenths]


def differ(truths: list[float], rollouts: int) -> bool:
    """Whether truths of `rollouts` rollouts each are more than noise apart (chi-square, 1 %)."""
    mean, bounds = statistics.mean(truths), (6.63, 9.21, 11.34, 13.28)  # 1 to 4 degrees of freedom
    squares = sum((truth - mean) ** 2 for truth in truths) * rollouts
    return squares > bounds[len(truths) - 2] * mean * (1 - mean)


def rank_actions(
    actions: list[list[dict]], estimator: str, rollouts: int
) -> tuple[float, float, int]:
    """(how often the step that the estimator puts first is a best one, chance, number of states).

    A best step is one whose truth is within 0.05 of the highest. Among equal predictions one is
    drawn, so a state counts with the share of best steps among those put first; chance is the share
    of best steps among all. Left out are states where every step is a best one, or where the truths
    (of `rollouts` rollouts) differ by noise only.
    """
    shares, chances = [], []
    for options in actions:
        highest = max(option["truth"] for option in options)
        best = [option["truth"] >= highest - CLOSE - 1e-9 for option in options]
        if all(best) or not differ([option["truth"] for option in options], rollouts):
            continue
        first = max(option[estimator] for option in options)
        put_first = [b for b, o in zip(best, options, strict=True) if o[estimator] == first]
        shares.append(sum(put_first) / len(put_first))
        chances.append(sum(best) / len(best))
    nan = float("nan")
    return (
        statistics.mean(shares) if shares else nan,
        statistics.mean(chances) if chances else nan,
        len(shares),
    )


def z_scores(states: list[dict], truth: int) -> list[float]:
    """(truth - exact value) in standard errors of the truth: mean 0 and variance 1 if exact values
    are the policy's. Only of states with 5 right and 5 wrong rollouts expected, or more: for values
    nearer to 0 or 1 the standard error does not describe the truth."""
    known = [s for s in states if s.get("exact") is not None]
    known = [s for s in known if 5 <= truth * s["exact"] <= truth - 5]
    return [
        (s["truth"] - s["exact"]) / (s["exact"] * (1 - s["exact"]) / truth) ** 0.5 for s in known
    ]


# ---- sampling ------------------------------------------------------------------------------------


def load_critic(args, tokenizer, model: str, critic: str) -> torch.nn.Module:
    """The critic whose weights are in the file `critic`, as section 5b of ppo.py makes it."""
    import safetensors.torch

    made = engines.load_model(args, tokenizer, model)
    hidden_size = made.get_output_embeddings().in_features
    made.set_output_embeddings(torch.nn.Linear(hidden_size, 1, dtype=made.dtype))
    made.load_state_dict(safetensors.torch.load_file(critic))
    return made


class Prober:
    """Asks one checkpoint for rollouts from prefixes, and its critic for values."""

    def __init__(self, args: Args, sampler, tokenizer):
        self.args, self.sampler, self.tokenizer, self.critic = args, sampler, tokenizer, None
        self.task = data.find_task(args)

    def use(self, model: str, critic: str = "") -> torch.nn.Module:
        """Switches to another checkpoint; `critic`: a critic's file, by default that beside it."""
        device = "cuda" if torch.cuda.is_available() else "cpu"
        policy = engines.load_model(self.args, self.tokenizer, model)
        self.sampler.wake(policy)
        critic = critic or os.path.join(os.path.dirname(model), "critic_hf/model.safetensors")
        self.critic = None
        if os.path.exists(critic):
            self.critic = load_critic(self.args, self.tokenizer, model, critic).to(device)
        return policy.to(device)

    def roll_out(
        self, prompts: list[list[int]], prefixes: list[list[int]], n: int, seed: int
    ) -> list[list[sampling.Sample]]:
        """`n` continuations of each prefix, to the end of the episode."""
        return self.sampler.generate(
            [prompt + prefix for prompt, prefix in zip(prompts, prefixes, strict=True)],
            n=n,
            max_tokens=[self.args.max_response_len - len(prefix) for prefix in prefixes],
            temperature=self.args.temperature,
            seed=(seed,),
            progress=n > 1,
        )

    def grade(self, prefix: list[int], rollouts: list[sampling.Sample], answer: str) -> list[float]:
        whole = [rollout._replace(ids=prefix + rollout.ids) for rollout in rollouts]
        answers = [answer] * len(rollouts)
        return grading.grade_all(self.tokenizer, whole, answers, self.task.grading_rule)

    def values(self, prompts, prefixes, answers: list[str], seed: int) -> list[dict[str, float]]:
        """Truth, VinePPO's estimate and the critic's, for the state behind each prefix."""
        total = self.args.truth + self.args.k
        found = []
        for prefix, rollouts, answer in zip(
            prefixes, self.roll_out(prompts, prefixes, total, seed), answers, strict=True
        ):
            rewards = self.grade(prefix, rollouts, answer)
            truth, others = rewards[: self.args.truth], rewards[self.args.truth :]
            found.append({"truth": statistics.mean(truth), "vineppo": statistics.mean(others)})
        if self.critic is not None:
            for state, value in zip(found, self.criticize(prompts, prefixes), strict=True):
                state["ppo"] = value
        return found

    @torch.no_grad()
    def criticize(self, prompts: list[list[int]], prefixes: list[list[int]]) -> list[float]:
        values = []
        for prompt, prefix in zip(prompts, prefixes, strict=True):
            # a state's value is read at its last token, where what follows is not seen
            ids = torch.tensor([prompt + prefix + [0]], device=self.critic.device)
            mask = torch.ones(1, len(prefix) + 1, device=self.critic.device)
            prompt_lens = torch.tensor([len(prompt)], device=self.critic.device)
            values.append(ppo.compute_values(self.critic, ids, prompt_lens, mask)[0, -1].item())
        return values


def probe_states(prober: Prober, problems, prompts, seed: int) -> tuple[list[dict], list[tuple]]:
    """States of the checkpoint's own responses with truth and predictions, and all responses as
    (problem, prompt ids, ids, reward, step ends)."""
    args = prober.args
    own = ranks.seed_of(seed, "responses")
    groups = prober.roll_out(prompts, [[]] * len(prompts), args.group_size, own)
    responses, candidates = [], []
    for problem, prompt, group in zip(problems, prompts, groups, strict=True):
        rewards = prober.grade([], group, problem.answer)
        for sample, reward in zip(group, rewards, strict=True):
            ends = steps.split_steps(sample.ids, prober.tokenizer, prober.task.step_rule)
            responses.append((problem, prompt, sample.ids, reward, ends))
            others = (sum(rewards) - reward) / max(1, len(rewards) - 1)
            group_mean = {"grpo": statistics.mean(rewards), "rloo": others}
            candidates += [(responses[-1], i, group_mean) for i in range(len(ends))]
    chosen = random.Random(seed).sample(candidates, min(args.num_states, len(candidates)))
    starts = [([0, *ends[:-1]][i], ids) for (_, _, ids, _, ends), i, _ in chosen]
    values = prober.values(
        [prompt for (_, prompt, *_), _, _ in chosen],
        [ids[:start] for start, ids in starts],
        [problem.answer for (problem, *_), _, _ in chosen],
        ranks.seed_of(seed, "values"),
    )
    states = []
    for ((problem, _, ids, reward, ends), i, group_mean), value in zip(chosen, values, strict=True):
        texts = steps.step_texts(ids, ends, prober.tokenizer)
        state = {"prompt": problem.prompt, "texts": texts, "step": i, "steps": len(ends)}
        states.append({**state, "reward": reward, **value, **group_mean})
    return states, responses


def probe_actions(prober: Prober, responses: list[tuple], seed: int) -> list[list[dict]]:
    """For each of `num_actions` states: its distinct next steps (of five, three at least), each
    with the values of the state behind it. A step that ends the response leads to no state."""
    args, rng = prober.args, random.Random(seed + 1)
    candidates = [(r, start) for r in responses for start in [0, *r[4][:-2]] if len(r[4]) > 1]
    chosen = rng.sample(candidates, min(args.num_actions, len(candidates)))
    prefixes = [r[2][:start] for r, start in chosen]
    groups = prober.roll_out([r[1] for r, _ in chosen], prefixes, 5, ranks.seed_of(seed, "actions"))
    options = []  # (which state, prefix)
    for i, (prefix, group) in enumerate(zip(prefixes, groups, strict=True)):
        found = set()
        for sample in group:
            ids = prefix + sample.ids
            ends = steps.split_steps(ids, prober.tokenizer, prober.task.step_rule)
            first = next((end for end in ends if end > len(prefix)), len(ids))
            if first < len(ids):
                found.add(tuple(ids[:first]))
        if len(found) >= 3:
            options += [(i, list(ids)) for ids in sorted(found)]
    values = prober.values(
        [chosen[i][0][1] for i, _ in options],
        [ids for _, ids in options],
        [chosen[i][0][0].answer for i, _ in options],
        ranks.seed_of(seed, "next"),
    )
    actions: dict[int, list[dict]] = {}
    for (i, _), value in zip(options, values, strict=True):
        actions.setdefault(i, []).append({**value, "grpo": 0.0, "rloo": 0.0})  # the same for all
    return list(actions.values())


def add_exact_values(prober: Prober, states: list[dict], policy, seed: int) -> None:
    """Adds "exact" on the embedded task, from the policy's own table of facts (from many prompts:
    an unseen fact would count as never right); None for a state whose response is not a chain."""
    from analysis.gradient import fact_table, sample_episodes

    problems = data.load_problems("chain", "sft")[:2048]
    options = prober.args.temperature, ranks.seed_of(seed, "facts")
    episodes = sample_episodes(prober.sampler, prober.tokenizer, problems, 1, *options)
    table = fact_table(policy, prober.tokenizer, episodes, prober.args.temperature)
    for state in states:
        digits = read_digits(state["prompt"], state["texts"])
        i, exact = state["step"], exact_values(state["prompt"], table)
        state["exact"] = exact[i, digits[i]].item() if digits else None


# ---- runs ----------------------------------------------------------------------------------------


def describe(name: str, states: list[dict], actions: list[list[dict]], truth: int) -> str:
    mean = statistics.mean(state["truth"] for state in states)
    lines = [f"{name}: {len(states)} states, mean truth {mean:.3f}"]
    for estimator in ESTIMATORS:
        if estimator in states[0]:
            of = measure([s["truth"] for s in states], [s[estimator] for s in states])
            line = f"  {estimator:8} MAE {of['mae']:.3f}, within 0.05 {of['close']:.0%}, "
            line += f"explained variance {of['explained']:.2f}, "
            line += f"within problems {within_problems(states, estimator):.2f}"
            share, chance, decided = rank_actions(actions, estimator, truth)
            if decided:
                line += f", top action {share:.0%} (chance {chance:.0%}, {decided} states)"
            lines.append(line)
    overall, within = ceilings(states, truth)
    lines.append(f"  exact values would have {overall:.2f} and {within:.2f}: truths are noisy too")
    scores = z_scores(states, truth)
    if len(scores) > 1:
        known = [s for s in states if s.get("exact") is not None]
        gap = statistics.mean(s["truth"] - s["exact"] for s in known)
        lines.append(
            f"  truth less exact value: {gap:+.4f} on average; z-scores of {len(scores)} states: "
            f"mean {statistics.mean(scores):+.2f}, variance {statistics.pvariance(scores):.2f}"
        )
    return "\n".join(lines)


def read_run(folder: str, args: Args) -> tuple[Args, dict[int, str], dict]:
    """(`args` with the settings of the run, {iteration: checkpoint that transformers loads}, all
    settings of the run)."""
    path = os.path.join(folder, "args.json")
    require(os.path.exists(path), f"{path}: no such file; {folder} is not the folder of a run")
    with open(path) as file:
        saved = json.load(file)
    names = ("task", "data_dir", "group_size", "temperature", "top_p", "stop", "dtype")
    names += ("max_response_len", "max_model_len", "trust_remote_code", "chat")
    names += ("grading_rule", "step_rule", "prompt_field", "answer_field", "solution_field")
    script = saved.get("script")
    require({*names} <= saved.keys(), f"{folder} is a run of {script}.py, which samples no groups")
    args = dataclasses.replace(args, run=folder, **{name: saved[name] for name in names})
    found = glob.glob(os.path.join(folder, "checkpoints", "iteration_*", "hf"))
    require(found, f"{folder} has no checkpoints")
    return args, {int(path.split("iteration_")[-1][:6]): path for path in sorted(found)}, saved


def set_up(args: Args, model: str) -> tuple[Prober, list[data.Problem], list[list[int]]]:
    """Engines with the checkpoint `model`, and the training problems that it is asked about."""
    ranks.set_up()
    args = dataclasses.replace(args, model=model)
    problems = data.load_split(args, "train")
    tokenizer = engines.load_tokenizer(args)
    problems, prompts = data.fit(args, problems, tokenizer)
    wanted = min(args.num_prompts, len(problems))
    picked = random.Random(args.seed).sample(range(len(problems)), wanted)
    prober = Prober(args, sampling.Sampler(args, tokenizer), tokenizer)
    return prober, [problems[i] for i in picked], [prompts[i] for i in picked]


def main(args: Args) -> None:
    require(bool(args.run) != bool(args.model), "give either --run or --model")
    flags.check(args)
    require(args.num_states > 0, f"--num-states {args.num_states}: must be at least 1")
    require(args.truth > 1, f"--truth {args.truth}: must be at least 2")
    checkpoints = {"checkpoint": (args.model, args.output)}
    if args.run:
        args, found, _ = read_run(args.run, args)
        missing = [i for i in args.iterations if i not in found]
        require(not missing, f"--iterations {missing}: {args.run} has checkpoints of {[*found]}")
        os.makedirs(os.path.join(args.run, "values"), exist_ok=True)
        checkpoints = {
            f"iteration {i}": (found[i], f"{args.run}/values/iteration_{i:06d}.json")
            for i in args.iterations or found
        }
    flags.check(args)
    require(args.num_actions >= 0, f"--num-actions {args.num_actions}: must be 0 or more")
    require(args.group_size > 1, f"--group-size {args.group_size}: must be at least 2")
    prober = None
    for name, (model, output) in checkpoints.items():
        model = os.path.realpath(model) if os.path.isdir(model) else model  # hf is a link
        weights = os.path.join(model, "model.safetensors")
        made = os.stat(weights).st_mtime_ns if os.path.exists(weights) else None
        settings = {**dataclasses.asdict(args), "iterations": None, "model": model, "made": made}
        result = {"settings": None}
        if os.path.exists(output):
            with open(output) as file:
                result = json.load(file)
        if result["settings"] != settings:
            if prober is None:
                prober, problems, prompts = set_up(args, model)
            policy = prober.use(model)
            states, responses = probe_states(prober, problems, prompts, args.seed)
            actions = probe_actions(prober, responses, args.seed) if args.num_actions else []
            if args.task == "chain":
                add_exact_values(prober, states, policy, args.seed)
            result = {"settings": settings, "states": states, "actions": actions}
            result["grading_failures"] = mathequal.worker.take_failures()
            with open(output + ".tmp", "w") as file:
                json.dump(result, file)
            os.replace(output + ".tmp", output)
        print(describe(name, result["states"], result["actions"], args.truth), flush=True)


if __name__ == "__main__":
    main(flags.parse(Args))
