"""The second computation: what the scripts did, computed again from what their engines were asked
and answered (tests/record.py), in the plainest way: one sequence at a time, sums and loops.

Nothing here is imported from the scripts or from common/, but the conventions are written down once
more: how a seed is made of words, in what order things are drawn, what the metrics are called.
"""

import functools
import hashlib
import json
import math
import os
import random
import re
import shutil
from itertools import pairwise

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.conftest import ROOT, call, differences, read_jsonl
from tests.mutants import read_planted
from tests.planted import PLANTED
from tests.record import make_start

PAD, EOS, NEWLINE = 0, 1, 17
SPECIAL = (PAD, EOS)
# What float32 leaves: two ways to add up the same numbers.
LOGPROB, GRADIENT, WEIGHT, METRIC = 2e-5, 2e-5, 1e-6, 2e-5


@pytest.fixture(scope="session")
def second(tmp_path_factory):
    """FOLDER of the runs on one rank. Where RECORDED names one it is taken as it is."""
    folder = os.environ.get("RECORDED")
    if not folder:
        folder = str(tmp_path_factory.mktemp("second"))
        make_start(folder)
        call("-m", "tests.record", folder)
    return folder


# ---- conventions ---------------------------------------------------------------------------------


def seed_of(*words) -> int:
    return int.from_bytes(hashlib.sha256(repr(words).encode()).digest()[:7])


def shuffled(size: int, *words) -> list[int]:
    order = list(range(size))
    random.Random(seed_of(*words, "epoch")).shuffle(order)
    return order


def stream(size: int, count: int, *words) -> list[int]:
    """The first `count` of one shuffled epoch after another."""
    drawn: list[int] = []
    for epoch in range(math.ceil(count / size)):
        drawn += shuffled(size, *words, epoch)
    return drawn[:count]


def rate_at(update: int, total: int, peak: float, warmup: float) -> float:
    """Up to the peak in the first steps, then down to 0."""
    rising = max(1, math.ceil(warmup * total))
    up = peak * (update + 1) / rising
    down = peak if total == rising else peak * (total - update) / (total - rising)
    return min(up, down, peak) if update + 1 >= rising else min(up, down)


# ---- a run ---------------------------------------------------------------------------------------


def read_flags(words: list[str]) -> dict:
    """The last value of each flag, as a number where it is one; without a value: true or, after
    "no-", false."""
    flags, words = {}, [*words[1:], "--end"]
    while len(words) > 1:
        name = words.pop(0).removeprefix("--").replace("-", "_")
        if words[0].startswith("--"):
            flags[name.removeprefix("no_")] = not name.startswith("no_")
            continue
        value = words.pop(0)
        for kind in (int, float, str):
            try:
                flags[name] = kind(value)
                break
            except ValueError:
                continue
    return flags


class Run:
    """What was written down of a run, in order; and a model that computes it again."""

    def __init__(self, folder: str, name: str):
        self.folder, self.name = os.path.join(folder, name), name
        ranks = []
        while os.path.exists(f"{self.folder}.{len(ranks)}.pt"):
            ranks.append(torch.load(f"{self.folder}.{len(ranks)}.pt"))
        self.flags, self.ranks = read_flags(ranks[0]["words"]), len(ranks)
        self.events = [self.merge(of_ranks) for of_ranks in self.align(ranks)]
        self.seconds = ranks[0]["end"] - self.events[0].get("time", -math.inf)
        self.tokenizer = AutoTokenizer.from_pretrained(self.flags["model"])
        self.model = AutoModelForCausalLM.from_pretrained(self.flags["model"]).eval()
        self.start = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        self.weights = self.start
        self.lines = []
        if os.path.exists(f"{self.folder}/metrics.jsonl"):
            self.lines = read_jsonl(f"{self.folder}/metrics.jsonl")
        self.rates: list[float] = []

    def align(self, ranks: list[dict]) -> list[list[dict]]:
        """Pairs up the ranks' events: all ranks have the same kinds in the same order."""
        if len(ranks) == 1:
            return [[event] for event in ranks[0]["events"]]
        return list(map(list, zip(*(rank["events"] for rank in ranks), strict=True)))

    def merge(self, of_ranks: list[dict]) -> dict:
        first = of_ranks[0]
        assert all(event["kind"] == first["kind"] for event in of_ranks)
        if first["kind"] == "step":
            return first
        asked = [one for event in of_ranks for one in event["asked"]]
        outputs = [one for event in of_ranks for one in event["outputs"]]
        return {**first, "asked": asked, "outputs": outputs, "seeds": [e["seed"] for e in of_ranks]}

    def next(self, kind: str) -> dict:
        assert self.events, f"no {kind} where one should be"
        assert self.events[0]["kind"] == kind
        return self.events.pop(0)

    def read_problems(self, split: str, first: int | None = None) -> list[dict]:
        """The first problems whose prompt leaves room for a response."""
        rows = read_jsonl(os.path.join(self.flags["data_dir"], f"{split}.jsonl"))
        room = self.flags["max_model_len"] - self.flags["max_response_len"]
        for row in rows:
            row["ids"] = self.tokenizer(row["prompt"])["input_ids"]
        return [row for row in rows if len(row["ids"]) <= room][:first]

    def text(self, ids: list[int]) -> str:
        return self.tokenizer.decode([i for i in ids if i not in SPECIAL])

    # ---- what the engine sampled

    def sampled(
        self, prompts: list[list[int]], n: int, temperature: float, limits: list[int], *seed
    ) -> list[list[dict]]:
        """The next call of the engine must be this one; its answers, which must come from the
        weights of now."""
        event = self.next("generate")
        assert [one["prompt"] for one in event["asked"]] == prompts
        # the temperature is in the logits already: the log-probs below have it
        expected = {"n": n, "temperature": 1, "top_p": self.flags["top_p"], "top_k": 0}
        expected |= {"min_p": 0, "seed": None, "ignore_eos": False, "repetition_penalty": 1}
        expected |= {"presence_penalty": 0, "frequency_penalty": 0}
        stop = self.flags.get("stop", "")
        expected["stop"] = [stop] if stop else []
        for one, limit in zip(event["asked"], limits, strict=True):
            asked = {k: v for k, v in one.items() if k != "prompt"}
            assert asked == {**expected, "max_tokens": limit}
        assert event["seeds"] == [seed_of(*seed, rank) for rank in range(self.ranks)]
        groups = [[self.read(one, stop) for one in group] for group in event["outputs"]]
        self.set_weights(self.weights)
        for prompt, group in zip(prompts, groups, strict=True):
            assert len(group) == n
            for sample in group[:2]:
                with torch.no_grad():
                    ours = self.logprobs(prompt, sample["ids"], temperature)
                theirs = torch.tensor(sample["logprobs"])
                assert (ours - theirs).abs().max() < LOGPROB * 5, "sampled by other weights"
        return groups

    def read(self, output: dict, stop: str) -> dict:
        """A sample without what belongs to the stop string."""
        ids = output["ids"]
        stopped = bool(stop) and output["stop"] == stop
        if stopped:  # without the tokens that begin inside the stop string
            place = self.tokenizer.decode(ids).index(stop)
            ids = [i for t, i in enumerate(ids) if len(self.tokenizer.decode(ids[:t])) < place]
        kept = output["logprobs"][: len(ids)]
        finished = stopped or ids[-1:] == [EOS]
        return {"ids": ids, "logprobs": kept, "finished": finished, "stopped": stopped}

    def reward(self, ids: list[int], finished: bool, answer: str) -> float:
        """1 for a finished response whose number after the last "####" is the answer."""
        _, marker, tail = self.text(ids).rpartition("####")
        found = re.search(r"([-+]?)\s{0,3}([-+]?)(\d+)", tail)
        if not (finished and marker and found):
            return 0.0
        sign = -1 if (found[1] or found[2]) == "-" else 1
        return float(sign * int(found[3]) == int(answer))

    # ---- the model

    def set_weights(self, weights: dict[str, torch.Tensor], model=None) -> None:
        for name, parameter in (model or self.model).named_parameters():
            parameter.data = weights[name].clone()

    def logprobs(self, prompt: list[int], response: list[int], temperature: float, model=None):
        """(T,) of the response's tokens, each predicted at the position before it."""
        logits = (model or self.model)(torch.tensor([prompt + response])).logits[0]
        table = torch.log_softmax(logits.float() / temperature, dim=-1)
        return torch.stack([table[len(prompt) + t - 1, i] for t, i in enumerate(response)])

    def logprobs_under(self, weights: dict, sequences, temperature: float) -> list[torch.Tensor]:
        self.set_weights(weights)
        with torch.no_grad():
            return [self.logprobs(p, r, temperature) for p, r in sequences]

    # ---- a step of the optimizer

    def check_step(self, loss_of, model, moments: dict, rate: float) -> dict:
        """The next step must follow the gradient of `loss_of(margin)[0]`, by AdamW without weight
        decay. The margin moves the borders of clipping by what float32 leaves: a token at a border
        may lie on either side."""
        event = self.next("step")
        named = dict(model.named_parameters())
        theirs = torch.cat([event["grads"][name].flatten() for name in named])
        distances = []
        for margin in (0.0, 2e-6, -2e-6):
            for one in model.parameters():
                one.grad = None
            loss_of(margin)[0].backward(retain_graph=True)
            ours = torch.cat([p.grad.flatten() for p in named.values()])
            distances.append(((ours - theirs).norm() / (theirs.norm() + 1e-2)).item())
            if distances[-1] <= GRADIENT:
                break
        assert min(distances) <= GRADIENT, f"gradient: {min(distances):.2g} of its norm away"
        assert event["lr"] == pytest.approx(rate, rel=1e-12)
        norm = theirs.norm().item()
        scale = min(1.0, self.flags["max_grad_norm"] / (norm + 1e-6))
        moments["t"] = moments.get("t", 0) + 1
        for name in named:
            gradient, weight = event["grads"][name] * scale, event["before"][name]
            zeros = torch.zeros_like(gradient)
            m = 0.9 * moments.get(name, (zeros, zeros))[0] + 0.1 * gradient
            v = 0.999 * moments.get(name, (zeros, zeros))[1] + 0.001 * gradient**2
            moments[name] = m, v
            m, v = m / (1 - 0.9 ** moments["t"]), v / (1 - 0.999 ** moments["t"])
            after = weight - rate * m / (v.sqrt() + 1e-8)
            assert (event["after"][name] - after).abs().max() <= WEIGHT + 1e-3 * rate, name
        moments["before"], moments["after"] = event["before"], event["after"]
        return {"learning_rate": rate, "policy/grad_norm": norm}

    # ---- the end

    def check_metrics(self, line: dict, expected: dict) -> None:
        """Every number of the line, but for the clock's and the padding of micro-batches; the
        sampler's gap is float noise and nothing else."""
        skipped = ("tokens/padding", "policy/sampler_gap")
        found = {k: v for k, v in line.items() if not k.startswith("time/") and k not in skipped}
        assert self.name in ("dpo_pos", "sft") or 0 < line["policy/sampler_gap"] < 1e-5
        assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
        for name, value in found.items():
            # a share of tokens jumps where one of them is at the border
            absolute = 5e-3 if name.endswith("fraction") else METRIC
            assert value == pytest.approx(expected[name], rel=1e-4, abs=absolute), name

    def check_end(self, weights: dict[str, torch.Tensor]) -> None:
        assert not self.events, "the engines were asked for more"
        for line in self.lines:
            phases = [v for k, v in line.items() if k.startswith("time/")]
            assert 2 * line["time/iteration"] == pytest.approx(sum(phases))
        # the clock of the phases: none counts twice
        assert sum(line["time/iteration"] for line in self.lines) <= 1.2 * self.seconds
        saved = load_file(f"{self.folder}/hf/model.safetensors")
        for name, weight in weights.items():
            assert torch.equal(saved[name], weight), name

    def evaluation(self, iteration: int) -> float:
        """pass@1 of the weights of now on the validation problems."""
        flags = self.flags
        problems = self.read_problems("validation", flags["eval_problems"])
        seed = seed_of(flags["seed"], iteration, "evaluate")
        groups = self.sampled(
            [p["ids"] for p in problems],
            flags["eval_rounds"],
            flags["eval_temperature"],
            [flags["max_response_len"]] * len(problems),
            seed,
            "evaluate",
        )
        rewards = [
            self.reward(s["ids"], s["finished"], p["answer"])
            for p, group in zip(problems, groups, strict=True)
            for s in group
        ]
        return sum(rewards) / len(rewards)

    def distance(self, weights: dict[str, torch.Tensor]) -> float:
        moved = sum(((weights[n] - self.start[n]) ** 2).sum() for n in weights)
        return math.sqrt(moved / sum((self.start[n] ** 2).sum() for n in weights))


# ---- the policy-gradient scripts -----------------------------------------------------------------


def step_starts(ids: list[int]) -> list[int]:
    """Where the steps of a response start: behind each newline that has text before it, and
    something behind it."""
    starts, written = [0], False
    for t, i in enumerate(ids):
        if i == NEWLINE and written and t + 1 < len(ids):
            starts.append(t + 1)
        written |= i not in (NEWLINE, *SPECIAL)
    return starts


def whiten(advantages: list[torch.Tensor]) -> list[torch.Tensor]:
    """Mean 0 and variance 1 over all tokens of the iteration."""
    every = torch.cat(advantages).double().tolist()
    mean = sum(every) / len(every)
    variance = sum((a - mean) ** 2 for a in every) / (len(every) - 1)
    if max(every) == min(every):
        return [torch.zeros_like(a) for a in advantages]
    return [(a - mean) / math.sqrt(variance + 1e-8) for a in advantages]


def vineppo_advantages(run: Run, batch: dict, iteration: int):
    """Eq. 5 and 6, a state at a time."""
    flags, rows = run.flags, range(len(batch["ids"]))
    starts = [step_starts(batch["ids"][row]) for row in rows]
    starts = [of_row[: flags.get("max_steps_valued", len(of_row))] for of_row in starts]
    shared = flags.get("share_rollouts", True)
    keys = [  # a state: (problem, or response where none is shared, prefix)
        [
            (batch["problem"][row] if shared else -row, tuple(batch["ids"][row][:start]))
            for start in starts[row]
        ]
        for row in rows
    ]
    states = {key: row for row in reversed(rows) for key in keys[row]}  # in which response first
    order = [*dict.fromkeys(key for of_row in keys for key in of_row)]
    problems = batch["problems"]
    problem_of = {key: batch["problem"][states[key]] for key in order}
    groups = run.sampled(
        [problems[problem_of[key]]["ids"] + list(key[1]) for key in order],
        flags["k"],
        flags["temperature"],
        [flags["max_response_len"] - len(prefix) for _, prefix in order],
        flags["seed"],
        iteration,
        "rollouts",
    )
    values, tokens = {}, 0
    for key, group in zip(order, groups, strict=True):
        answer = problems[problem_of[key]]["answer"]
        paid = [run.reward([*key[1], *s["ids"]], s["finished"], answer) for s in group]
        values[key] = sum(paid) / len(paid)
        tokens += sum(len(s["ids"]) for s in group)
    advantages, step_values = [], []
    for row in rows:
        ids, of_steps = batch["ids"][row], [values[key] for key in keys[row]]
        if flags.get("reuse_responses"):  # the others of the group are rollouts from the prompt too
            first = row - row % flags["group_size"]
            group = batch["rewards"][first : first + flags["group_size"]]
            total = of_steps[0] * flags["k"] + sum(group) - batch["rewards"][row]
            of_steps[0] = total / (flags["k"] + len(group) - 1)
        after = [*of_steps[1:], batch["rewards"][row]]
        changes = [then - before for before, then in zip(of_steps, after, strict=True)]
        one = torch.zeros(len(ids))
        for i, (start, end) in enumerate(pairwise([*starts[row], len(ids)])):
            smoothing = flags.get("smoothing", 0.0)
            one[start:end] = sum(x * smoothing ** abs(i - n) for n, x in enumerate(changes))
        advantages.append(one)
        step_values.append(of_steps)
    undecided = [0 < value < 1 for value in values.values()]
    metrics = {
        "adv/value": sum(values.values()) / len(values),
        "adv/undecided": sum(undecided) / len(undecided),
        "adv/states": len(values),
        "tokens/rollouts": tokens,
    }
    return advantages, whiten(advantages), starts, step_values, metrics


def grpo_advantages(run: Run, batch: dict, iteration: int):
    size, rewards, advantages = run.flags["group_size"], batch["rewards"], []
    means, undecided = [], 0
    for first in range(0, len(rewards), size):
        group = rewards[first : first + size]
        mean = sum(group) / size
        spread = math.sqrt(sum((r - mean) ** 2 for r in group) / size)
        undecided += max(group) > min(group)
        for row, reward in enumerate(group, first):
            one = 0.0 if max(group) == min(group) else (reward - mean) / (spread + 1e-8)
            advantages.append(torch.full((len(batch["ids"][row]),), one))
            means.append([mean])
    metrics = {"adv/undecided": undecided / (len(rewards) / size)}
    return advantages, advantages, [[0]] * len(rewards), means, metrics


def rloo_advantages(run: Run, batch: dict, iteration: int):
    size, rewards, advantages = run.flags["group_size"], batch["rewards"], []
    baselines, undecided = [], 0
    for first in range(0, len(rewards), size):
        group = rewards[first : first + size]
        undecided += max(group) > min(group)
        for row, reward in enumerate(group, first):
            others = (sum(group) - reward) / (size - 1)
            advantages.append(torch.full((len(batch["ids"][row]),), reward - others))
            baselines.append([others])
    metrics = {"adv/undecided": undecided / (len(rewards) / size)}
    return advantages, whiten(advantages), [[0]] * len(rewards), baselines, metrics


def critic_values(run: Run, critic, prompt: list[int], response: list[int]) -> torch.Tensor:
    """(T,) of the states before each token of the response."""
    values = critic(torch.tensor([prompt + response])).logits[0, :, 0]
    return values[len(prompt) - 1 : len(prompt) + len(response) - 1]


def ppo_advantages(run: Run, batch: dict, iteration: int):
    """The double sum of generalised advantage estimation."""
    gamma, lam, advantages = run.flags["gamma"], run.flags["gae_lambda"], []
    run.set_weights(run.critic_weights, run.critic)
    with torch.no_grad():
        values = [critic_values(run, run.critic, p, r) for p, r in batch["sequences"]]
    for reward, of_tokens in zip(batch["rewards"], values, strict=True):
        v, length = [*of_tokens.tolist(), 0.0], len(of_tokens)
        deltas = [(t == length - 1) * reward + gamma * v[t + 1] - v[t] for t in range(length)]
        sums = [
            sum((gamma * lam) ** (s - t) * deltas[s] for s in range(t, length))
            for t in range(length)
        ]
        advantages.append(torch.tensor(sums))
    batch["values"] = values
    batch["returns"] = [a + v for a, v in zip(advantages, values, strict=True)]
    starts = [step_starts(ids) for ids in batch["ids"]]
    step_values = [[v[s].item() for s in of_row] for v, of_row in zip(values, starts, strict=True)]
    returns, every = torch.cat(batch["returns"]), torch.cat(values)
    error = returns - every
    metrics = {
        "adv/value": every.mean().item(),
        "adv/value_error": error.abs().mean().item(),
        "adv/explained_variance": (1 - error.var() / returns.var()).item(),
    }
    return advantages, whiten(advantages), starts, step_values, metrics


def make_critic(run: Run) -> None:
    """The checkpoint with a head of one number."""
    run.critic = AutoModelForCausalLM.from_pretrained(run.flags["model"]).eval()
    size = run.critic.config.hidden_size
    torch.manual_seed(seed_of(run.flags["seed"], "critic"))
    head = torch.nn.Linear(size, 1)
    torch.manual_seed(seed_of(run.flags["seed"], "critic"))
    head.weight.data.normal_(0, 1 / math.sqrt(size + 1))
    head.bias.data.zero_()
    run.critic.lm_head = head
    run.critic_weights = {n: p.detach().clone() for n, p in run.critic.named_parameters()}


def policy_loss(run: Run, batch: dict, rows: list[int], advantages, margin: float):
    """Eq. 8 with k3; tokens for the surrogate, responses for the KL. And sums for the log."""
    clip, sums = run.flags["clip_coef"] + margin, dict.fromkeys(POLICY_METRICS, 0.0)
    tokens, loss = sum(len(batch["ids"][row]) for row in rows), torch.tensor(0.0)
    for row in rows:
        prompt, response = batch["sequences"][row]
        new = run.logprobs(prompt, response, run.flags["temperature"])
        old, ref, advantage = batch["old"][row], batch["ref"][row], advantages[row]
        ratio = torch.exp(new - old)
        low_high = torch.clip(ratio, 1 - clip, 1 + clip)
        surrogate = torch.minimum(ratio * advantage, low_high * advantage)
        k3 = torch.clip(torch.exp(ref - new) - (ref - new) - 1, 0, 10)
        loss = loss - surrogate.sum() / tokens
        loss = loss + run.flags["kl_coef"] * k3.sum() / len(rows)
        with torch.no_grad():
            sums["loss/policy"] -= surrogate.sum().item()
            sums["policy/kl"] += k3.sum().item()
            sums["policy/kl_clamped"] += (k3 == 10).sum().item()
            sums["policy/approx_kl"] += (ratio - 1 - (new - old)).sum().item()
            outside = (ratio < 1 - clip) | (ratio > 1 + clip)
            sums["policy/clip_fraction"] += outside.sum().item()
            sums["policy/ratio"] += ratio.sum().item()
    return loss, {name: value / tokens for name, value in sums.items()}


POLICY_METRICS = ("loss/policy", "policy/kl", "policy/kl_clamped", "policy/approx_kl")
POLICY_METRICS += ("policy/clip_fraction", "policy/ratio")


def value_loss(run: Run, batch: dict, rows: list[int], margin: float):
    clip, clipped = run.flags["clip_coef_value"] + margin, 0
    tokens, loss = sum(len(batch["ids"][row]) for row in rows), torch.tensor(0.0)
    for row in rows:
        new = critic_values(run, run.critic, *batch["sequences"][row])
        old, returns = batch["values"][row], batch["returns"][row]
        near = old + torch.clip(new - old, -clip, clip)
        far, close = (new - returns) ** 2, (near - returns) ** 2
        loss = loss + 0.5 * torch.maximum(far, close).sum() / tokens
        clipped += ((close > far) & ((new - old).abs() > clip)).sum().item()
    return loss, {"loss/value": loss.item(), "value/clip_fraction": clipped / tokens}


ESTIMATORS = {"vineppo": vineppo_advantages, "vineppo_cheap": vineppo_advantages}
ESTIMATORS |= {"ppo": ppo_advantages, "grpo": grpo_advantages, "rloo": rloo_advantages}


def draw_and_sample(run: Run, problems: list[dict], drawn: list[int], *seed) -> dict:
    """6.1 to 6.3: the batch of an iteration."""
    flags = run.flags
    groups = run.sampled(
        [problems[index]["ids"] for index in drawn],
        flags["group_size"],
        flags["temperature"],
        [flags["max_response_len"]] * len(drawn),
        flags["seed"],
        *seed,
        "sample",
    )
    batch = {"problems": problems, "problem": [], "ids": [], "rewards": [], "sequences": []}
    samples = [sample for group in groups for sample in group]
    for index, group in zip(drawn, groups, strict=True):
        for sample in group:
            batch["problem"].append(index)
            batch["ids"].append(sample["ids"])
            batch["sequences"].append((problems[index]["ids"], sample["ids"]))
            batch["rewards"].append(
                run.reward(sample["ids"], sample["finished"], problems[index]["answer"])
            )
    tokens = sum(len(ids) for ids in batch["ids"])
    batch["metrics"] = {
        "rollout/reward": sum(batch["rewards"]) / len(samples),
        "rollout/response_length": tokens / len(samples),
        "rollout/unfinished": sum(not s["finished"] for s in samples) / len(samples),
        "rollout/stop_string": sum(s["stopped"] for s in samples) / len(samples),
        "tokens/sample": tokens,
    }
    return batch


def check_episodes(run: Run, iteration: int, batch: dict, advantages, starts, values) -> None:
    """The response whose values differ most, and the first one of the first three groups."""
    spread = [max(of_row) - min(of_row) for of_row in values]
    rows = [spread.index(max(spread)), *range(0, len(spread), run.flags["group_size"])][:4]
    lines = read_jsonl(f"{run.folder}/episodes.jsonl")
    lines = [line for line in lines if line["iteration"] == iteration + 1]
    assert len(lines) == len(rows)
    for line, row in zip(lines, rows, strict=True):
        ids, steps = batch["ids"][row], line["steps"]
        assert line["prompt"] == batch["problems"][batch["problem"][row]]["prompt"]
        assert line["reward"] == batch["rewards"][row]
        assert "".join(step["text"] for step in steps) == run.text(ids)
        assert len(steps) == len(starts[row])
        for step, value in zip(steps, values[row], strict=True):
            assert step["value"] == pytest.approx(value, abs=METRIC)
        ends = [*starts[row][1:], len(ids)]
        for step, end in zip(steps, ends, strict=True):
            assert step["advantage"] == pytest.approx(advantages[row][end - 1].item(), abs=1e-4)


def check_policy_gradient(folder: str, name: str) -> dict:
    run = Run(folder, name)
    flags, problems = run.flags, run.read_problems("train")
    seed, iterations, size = flags["seed"], flags["num_iterations"], flags["num_prompts"]
    responses = size * flags["group_size"]
    per_iteration = 2 * responses // flags["minibatch_size"]
    moments: dict = {}
    critic_moments: dict = {}
    run.seen = dict(clipped=0, cut=0, complete_but_cut=0, spread=0)
    if name == "ppo":
        make_critic(run)
    for iteration in range(iterations):
        drawn = stream(len(problems), (iteration + 1) * size, seed)[iteration * size :]
        batch = draw_and_sample(run, problems, drawn, iteration)
        for row, ids in enumerate(batch["ids"]):  # is there what the limits are for?
            if ids[-1:] != [EOS]:
                answer = problems[batch["problem"][row]]["answer"]
                run.seen["complete_but_cut"] += run.reward(ids, True, answer)
        temperature = flags["temperature"]
        batch["old"] = run.logprobs_under(run.weights, batch["sequences"], temperature)
        batch["ref"] = run.logprobs_under(run.start, batch["sequences"], temperature)
        raw, advantages, starts, values, metrics = ESTIMATORS[name](run, batch, iteration)
        metrics |= batch["metrics"]
        updates: list[dict] = []
        for epoch in range(2):
            order = shuffled(responses, seed, iteration, epoch, 0)
            for first in range(0, responses, flags["minibatch_size"]):
                rows = order[first : first + flags["minibatch_size"]]
                rate = [iteration * per_iteration + len(updates), iterations * per_iteration]
                warmup = flags["warmup_fraction"]
                run.set_weights(run.weights)
                loss_of = functools.partial(policy_loss, run, batch, rows, advantages)
                _, means = loss_of(0.0)
                means |= {"policy/skipped": 0.0}
                peak = rate_at(*rate, flags["learning_rate"], warmup)
                means |= run.check_step(loss_of, run.model, moments, peak)
                check_same(moments["before"], run.weights)
                run.weights = moments["after"]
                if name == "ppo":
                    run.set_weights(run.critic_weights, run.critic)
                    loss_of = functools.partial(value_loss, run, batch, rows)
                    _, more = loss_of(0.0)
                    peak = rate_at(*rate, flags["critic_learning_rate"], warmup)
                    made = run.check_step(loss_of, run.critic, critic_moments, peak)
                    more["value/grad_norm"] = made["policy/grad_norm"]
                    check_same(critic_moments["before"], run.critic_weights)
                    run.critic_weights = critic_moments["after"]
                    means |= more
                updates.append(means)
                run.seen["clipped"] += means["policy/grad_norm"] > flags["max_grad_norm"]
        metrics |= {k: sum(u[k] for u in updates) / len(updates) for k in updates[0]}
        if (iteration + 1) % flags["eval_every"] == 0 or iteration + 1 == iterations:
            metrics["eval/pass@1"] = run.evaluation(iteration)
            metrics["policy/weight_distance"] = run.distance(run.weights)
        run.check_metrics(run.lines[iteration], metrics | {"iteration": iteration + 1})
        check_episodes(run, iteration, batch, raw, starts, values)
        run.seen["cut"] += metrics["rollout/unfinished"]
        run.seen["spread"] += max(batch["rewards"]) - min(batch["rewards"])
        run.seen["outside"] = metrics["policy/clip_fraction"]
        if "stop" in flags:
            run.seen["stopped"] = run.seen.get("stopped", 0) + metrics["rollout/stop_string"]
    assert len(run.lines) == iterations
    run.check_end(run.weights)
    return run.seen


def check_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name in one:
        assert torch.equal(one[name], other[name]), f"{name}: not the weights of before"


# ---- the RL-free scripts -------------------------------------------------------------------------


def sft_loss(run: Run, sequences, temperature: float) -> torch.Tensor:
    """A response weighs the same, long or short."""
    loss = torch.tensor(0.0)
    for prompt, response in sequences:
        loss = loss - run.logprobs(prompt, response, temperature).mean() / len(sequences)
    return loss


def check_restem(folder: str, name: str) -> dict:
    run = Run(folder, name)
    flags, problems = run.flags, run.read_problems("train")
    seed, size = flags["seed"], flags["num_prompts"]
    walks = 0
    for iteration in range(flags["num_iterations"]):
        drawn = stream(len(problems), (iteration + 1) * size, seed)[iteration * size :]
        batch = draw_and_sample(run, problems, drawn, iteration)
        kept = [row for row, reward in enumerate(batch["rewards"]) if reward == 1]
        assert kept, "the recorded run shows too little: no response is right"
        minibatch = min(flags["minibatch_size"], len(kept))
        total = math.ceil(flags["update_epochs"] * len(kept) / minibatch)
        order = stream(len(kept), total * minibatch, seed, iteration, "update")
        run.weights, moments = run.start, {}  # from the start again, and a new optimizer
        accuracies, updates, chosen = [], [], None
        for update in range(total + 1):
            if update % flags["eval_every"] == 0 or update == total:
                accuracies.append(run.evaluation(iteration))
                if len(accuracies) > 1 and accuracies[-1] <= accuracies[-2]:
                    break
                chosen = update, run.weights
            if update == total:
                break
            rows = [kept[i] for i in order[update * minibatch : (update + 1) * minibatch]]
            run.set_weights(run.weights)
            loss = sft_loss(run, [batch["sequences"][row] for row in rows], flags["temperature"])
            rate = rate_at(update, total, flags["learning_rate"], flags["warmup_fraction"])
            made = run.check_step(lambda margin, loss=loss: (loss,), run.model, moments, rate)
            check_same(moments["before"], run.weights)
            run.weights = moments["after"]
            updates.append(made | {"loss/sft": loss.item()})
        walks += chosen[0] > 0
        run.weights = chosen[1]
        metrics = {k: sum(u[k] for u in updates) / len(updates) for k in updates[0]}
        metrics |= batch["metrics"] | {"iteration": iteration + 1, "walk/kept": len(kept)}
        metrics |= {"walk/chosen_update": chosen[0], "walk/updates": len(updates)}
        metrics |= {"walk/evaluations": len(accuracies), "eval/pass@1": max(accuracies)}
        metrics["policy/weight_distance"] = run.distance(run.weights)
        run.check_metrics(run.lines[iteration], metrics)
    run.check_end(run.weights)
    return {"walks beyond the first step": walks}


def check_dpo_positive(folder: str, name: str) -> dict:
    run = Run(folder, name)
    flags, problems = run.flags, run.read_problems("train")
    seed, size = flags["seed"], flags["group_size"]
    drawn = shuffled(len(problems), seed, 0)  # more are asked for than there are
    batch = draw_and_sample(run, problems, drawn)
    pairs: list[tuple[int, int]] = []
    for first in range(0, len(batch["rewards"]), size):
        group = range(first, first + size)
        right = [row for row in group if batch["rewards"][row] == 1]
        wrong = [row for row in group if batch["rewards"][row] == 0]
        every = [(one, other) for one in right for other in wrong]
        rng = random.Random(seed_of(seed, first, "pairs"))
        pairs += rng.sample(every, min(flags["max_pairs"], len(every)))
    minibatch, moments, penalised = flags["minibatch_size"], {}, 0
    total = math.ceil(flags["update_epochs"] * len(pairs) / minibatch)
    order = stream(len(pairs), total * minibatch, seed, "update")
    temperature = flags["temperature"]
    ref = run.logprobs_under(run.start, batch["sequences"], temperature)
    for update in range(total):
        mine = [pairs[i] for i in order[update * minibatch : (update + 1) * minibatch]]
        run.set_weights(run.weights)
        loss, sums = torch.tensor(0.0), dict.fromkeys(DPO_METRICS, 0.0)
        for right, wrong in mine:
            chosen, rejected = (
                run.logprobs(*batch["sequences"][row], temperature).sum() for row in (right, wrong)
            )
            gain, other = chosen - ref[right].sum(), rejected - ref[wrong].sum()
            # at 0, where training starts, rounding must not decide: the first step has no penalty
            lost = -gain if gain < -1e-4 else gain * 0
            z = gain - other - flags["penalty"] * lost
            one = torch.log(1 + torch.exp(-flags["beta"] * z))
            loss = loss + one / len(mine)
            found = (chosen, rejected, gain, other, gain > other, lost > 0, one)
            for name, x in zip(DPO_METRICS, found, strict=True):
                sums[name] += x.item() / len(mine)
        rate = rate_at(update, total, flags["learning_rate"], flags["warmup_fraction"])
        metrics = run.check_step(lambda margin, loss=loss: (loss,), run.model, moments, rate) | sums
        check_same(moments["before"], run.weights)
        run.weights, done = moments["after"], update + 1
        metrics["iteration"] = done
        if done % flags["eval_every"] == 0 or done == total:
            metrics["eval/pass@1"] = run.evaluation(update)
            metrics["policy/weight_distance"] = run.distance(run.weights)
        if done == 1:
            metrics |= {n: batch["metrics"][n] for n in ("rollout/reward", "tokens/sample")}
        # gain > other is decided by rounding where both are 0
        run.check_metrics(run.lines[update], metrics | ({"dpo/accuracy": 0.0} if done == 1 else {}))
        penalised += sums["dpo/penalised"]
    run.check_end(run.weights)
    assert len(run.lines) == total
    return {"several epochs": total > len(pairs) / minibatch, "penalised": penalised}


DPO_METRICS = ("dpo/chosen_logprob", "dpo/rejected_logprob", "dpo/chosen_logratio")
DPO_METRICS += ("dpo/rejected_logratio", "dpo/accuracy", "dpo/penalised", "loss/dpo")


def check_sft(folder: str, name: str) -> dict:
    run = Run(folder, name)
    flags = run.flags

    def encoded(split: str, first: int | None = None) -> list[tuple[list[int], list[int]]]:
        rows = read_jsonl(os.path.join(flags["data_dir"], f"{split}.jsonl"))
        ids = [[run.tokenizer(row[k])["input_ids"] for k in ("prompt", "solution")] for row in rows]
        fits = [(p, [*s, EOS]) for p, s in ids if len(p) + len(s) + 1 <= flags["max_model_len"]]
        return fits[:first]

    problems, validation = encoded("sft"), encoded("validation", flags["eval_problems"])
    size, moments = flags["batch_size"], {}
    total = round(flags["num_epochs"] * len(problems) / size)
    order = stream(len(problems), total * size, flags["seed"])
    for step in range(total):
        run.set_weights(run.weights)
        batch = [problems[i] for i in order[step * size : (step + 1) * size]]
        loss = sft_loss(run, batch, 1.0)
        rate = rate_at(step, total, flags["learning_rate"], 0.1)
        metrics = run.check_step(lambda margin, loss=loss: (loss,), run.model, moments, rate) | {
            "loss/sft": loss.item()
        }
        check_same(moments["before"], run.weights)
        run.weights, metrics["iteration"] = moments["after"], step + 1
        if (step + 1) % flags["eval_every"] == 0 or step + 1 == total:
            run.set_weights(run.weights)
            with torch.no_grad():
                metrics["eval/loss"] = sft_loss(run, validation, 1.0).item()
        run.check_metrics(run.lines[step], metrics)
    run.check_end(run.weights)
    assert len(run.lines) == total
    return {"steps": total}


def check_evaluate(folder: str, name: str) -> dict:
    run = Run(folder, name)
    flags = run.flags
    problems = run.read_problems("test", flags["num_problems"])
    groups = run.sampled(
        [p["ids"] for p in problems],
        flags["rounds"],
        flags["temperature"],
        [flags["max_response_len"]] * len(problems),
        flags["seed"],
        "evaluate",
    )
    with open(f"{run.folder}.json") as file:
        result = json.load(file)
    scores = [
        sum(run.reward(s["ids"], s["finished"], p["answer"]) for s in group) / flags["rounds"]
        for p, group in zip(problems, groups, strict=True)
    ]
    mean = sum(scores) / len(scores)
    assert result["scores"] == pytest.approx(scores)
    assert result["pass@1"] == pytest.approx(mean)
    rng, size = random.Random(0), len(scores)
    means = sorted(sum(rng.choices(scores, k=size)) / size for _ in range(10_000))
    step = 1 / (size * flags["rounds"])  # of a mean: another draw may end a step away
    assert result["interval"] == pytest.approx([means[250], means[-251]], abs=0.05 + step)
    assert not run.events
    return {"right": mean, "wrong": 1 - mean}


CHECKS = dict.fromkeys(ESTIMATORS, check_policy_gradient)
CHECKS |= {"restem": check_restem, "dpo_pos": check_dpo_positive, "sft": check_sft}
CHECKS |= {"evaluate": check_evaluate}


@pytest.mark.parametrize("name", CHECKS)
def test_second_computation(second, name):
    seen = CHECKS[name](second, name)
    assert all(seen.values()), f"the recorded run shows too little: {seen}"


@pytest.mark.parametrize("name", [name for name in CHECKS if name != "evaluate"])
def test_resumed_from_its_middle_it_is_the_same_to_the_bit(second, name):
    assert differences(f"{second}/{name}.resumed", f"{second}/{name}") == []


def test_what_can_be_planted():
    """Each mistake of tests/planted.py has its place and leaves Python; tests/mutants.py plants
    them (make soak)."""
    assert len(read_planted("")) > 100
    for one in PLANTED:
        with open(os.path.join(ROOT, one.file)) as file:
            compile(file.read().replace(one.old, one.new), one.file, "exec")


WITHOUT_SFT = tuple(name for name in CHECKS if name != "sft")
SHAPES = [  # (ranks, runs, flags of all of them)
    (2, tuple(CHECKS), ""),
    (2, ("vineppo", "ppo", "grpo", "rloo", "restem", "dpo_pos", "sft"), "--zero-stage 2"),
    (2, ("vineppo", "ppo", "dpo_pos", "sft"), "--zero-stage 3"),
    (1, WITHOUT_SFT, "--stop '\nthus'"),  # behind the answer, where some responses go on
    (2, ("vineppo",), "--stop '\n####'"),  # before it
    (1, ("vineppo",), "--k 1 --group-size 2 --minibatch-size 4"),
    (1, ("grpo", "rloo", "ppo"), "--group-size 2 --minibatch-size 12 --seed 5"),
    (2, ("vineppo", "ppo", "grpo"), "--micro-batch-tokens 20 --update-epochs 2"),
]


@pytest.mark.soak
@pytest.mark.parametrize(("ranks", "runs", "flags"), SHAPES)
def test_second_computation_of_other_shapes(second, ranks, runs, flags, tmp_path):
    for name in ("problems", "model"):
        shutil.copytree(f"{second}/{name}", tmp_path / name, symlinks=True)
    call("-m", "tests.record", str(tmp_path), "--runs", *runs, f"--flags={flags}", ranks=ranks)
    for name in runs:
        seen = CHECKS[name](str(tmp_path), name)
        if name in ESTIMATORS:  # with a stop string before the answer none reaches the limit
            assert (seen["cut"] or "####" in flags) and seen.get("stopped", 1), seen
        if name != "evaluate":
            assert differences(tmp_path / f"{name}.resumed", tmp_path / name) == []
