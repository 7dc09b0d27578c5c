"""How well does an estimator of advantages point? The cosine between an iteration's policy gradient
and the exact one, on the embedded task. No training, a few minutes.

    python -m analysis.gradient --model runs/sft/hf

The exact gradient uses no sampled reward or digit: at the `=` of each line of many responses, it is
the sum over results of grad P(result) * V(state after it), with V by dynamic programming. (Other
tokens change no value.) An estimator's gradient is that of an iteration before its first step,
without KL: the mean over tokens of A grad log P(token). Every state, the prompt too, has its own
rollouts here.
"""

import itertools
import math
import statistics
from collections.abc import Iterator
from typing import NamedTuple

import torch
import tyro
from tqdm import tqdm

import grpo
import ppo
import rloo
import vineppo
from analysis.exact import DIGITS, OPS, exact_values, read_digits, read_prompt
from common import data, engines, grading, ranks, require, sampling, steps
from common.batches import Batch


class Episode(NamedTuple):
    problem: data.Problem
    prompt_ids: list[int]
    ids: list[int]
    reward: float
    ends: list[int]  # of its steps
    logprobs: list[float]  # as sampled
    digits: list[int] | None  # running digit in which each step starts; None: not a proper chain


def sample_episodes(sampler, tokenizer, problems, group_size, temperature, seed) -> list[Episode]:
    prompts = tokenizer([problem.prompt for problem in problems]).input_ids
    limits = [sampler.args.max_response_len] * len(prompts)
    seeds = seed, "responses"
    groups = sampler.generate(prompts, group_size, limits, temperature, seeds, logprobs=True)
    episodes = []
    for problem, prompt_ids, group in zip(problems, prompts, groups, strict=True):
        rewards = grading.grade_all(tokenizer, group, [problem.answer] * group_size, "####")
        for sample, reward in zip(group, rewards, strict=True):
            ends = steps.split_steps(sample.ids, tokenizer, "line")
            texts = steps.step_texts(sample.ids, ends, tokenizer)
            digits = read_digits(problem.prompt, texts)
            known = reward, ends, sample.logprobs, digits
            episodes.append(Episode(problem, prompt_ids, sample.ids, *known))
    return episodes


def pad(episodes: list[Episode], device) -> list[torch.Tensor]:
    """(b, L) input_ids, (b,) prompt_lens, (b, T) response_mask."""
    batch = Batch([e.prompt_ids for e in episodes], [e.ids for e in episodes], 0, device)
    return batch.take(list(range(len(episodes))))


def result_probabilities(
    policy, tokenizer, episodes: list[Episode], temperature: float
) -> Iterator[tuple[list[tuple[Episode, int]], torch.Tensor]]:
    """64 episodes at a time: (episode, line) and (lines, 11) P(result), with its graph."""
    tens = tokenizer.convert_tokens_to_ids(list(DIGITS))
    equals = tokenizer.convert_tokens_to_ids("=")
    for first in tqdm(range(0, len(episodes), 64), desc="exact"):
        some = [episode for episode in episodes[first : first + 64] if episode.digits]
        if not some:
            continue
        input_ids, prompt_lens, _ = pad(some, policy.device)
        logits = policy(input_ids).logits / temperature  # (b, L, V)
        lines, places = [], []
        for row, episode in enumerate(some):
            for line, start in enumerate([0, *episode.ends[:-2]]):
                lines.append((episode, line))
                places.append((row, int(prompt_lens[row]) + episode.ids.index(equals, start)))
        rows, positions = zip(*places, strict=True)
        yield lines, torch.softmax(logits[rows, positions], dim=-1)[:, tens]


@torch.no_grad()
def fact_table(policy, tokenizer, episodes: list[Episode], temperature: float) -> torch.Tensor:
    """(2, 11, 10, 11) P(result | operation, digit, operand), mean over the lines of the episodes;
    0 for a fact that none of them uses."""
    sums, counts = torch.zeros(2, len(DIGITS), 10, len(DIGITS)), torch.zeros(2, len(DIGITS), 10, 1)
    for lines, results in result_probabilities(policy, tokenizer, episodes, temperature):
        for (episode, line), result in zip(lines, results.cpu(), strict=True):
            op, operand = read_prompt(episode.problem.prompt)[1][line]
            sums[OPS.index(op), episode.digits[line], operand] += result
            counts[OPS.index(op), episode.digits[line], operand] += 1
    return sums / counts.clamp(min=1)


def flat_gradient(policy) -> torch.Tensor:
    gradient = torch.cat([p.grad.flatten() for p in policy.parameters()])
    policy.zero_grad()
    return gradient


class Draw(NamedTuple):
    reward: float
    ids: list[int]


def roll_out(
    sampler,
    tokenizer,
    episodes: list[Episode],
    ends: list[list[int]],
    k: int,
    temperature: float,
    seed: tuple[int | str, ...],
) -> list[list[list[Draw]]]:
    """For each episode, K draws from each state in which a step starts; `ends` of the steps."""
    starts = [
        (e, e.ids[:start]) for e, of in zip(episodes, ends, strict=True) for start in [0, *of[:-1]]
    ]
    groups = sampler.generate(
        [e.prompt_ids + prefix for e, prefix in starts],
        k,
        [sampler.args.max_response_len - len(prefix) for _, prefix in starts],
        temperature,
        seed,
        progress=True,
    )
    of_states = []
    for (e, prefix), group in zip(starts, groups, strict=True):
        whole = [rollout._replace(ids=prefix + rollout.ids) for rollout in group]
        rewards = grading.grade_all(tokenizer, whole, [e.problem.answer] * k, "####")
        of_states.append([Draw(x, r.ids) for x, r in zip(rewards, group, strict=True)])
    left = iter(of_states)
    return [[next(left) for _ in of] for of in ends]


class Study(NamedTuple):
    sampler: sampling.Sampler
    policy: torch.nn.Module
    tokenizer: object
    episodes: list[Episode]  # batches of num_prompts x group_size
    draws: list[list[list[Draw]]]  # of each episode, of each state in which a step starts: K
    table: torch.Tensor  # of facts
    values: dict[str, torch.Tensor]  # prompt -> (S, 11), exact
    halves: list[torch.Tensor]  # two estimates of the exact gradient of an episode, (P,) each
    exact: torch.Tensor  # their mean
    chains: float  # share of responses that are proper chains
    mean_reward: float


def make_study(args: vineppo.Args, batches: int, exact_episodes: int) -> Study:
    """Samples all of it, and prints how far the exact values can be trusted."""
    k, group_size, temperature, seed = args.k, args.group_size, args.temperature, args.seed
    require(batches > 1 and k > 0, f"--batches {batches}, K {k}: must be at least 2 and 1")
    # the exact gradient needs many prompts rather than many responses: those of the demonstrations
    others = data.load_problems(args.task, "sft", args.data_dir)[:exact_episodes]
    wanted = batches * args.num_prompts
    problems = data.load_problems(args.task, "train", args.data_dir)[:wanted]
    require(len(problems) == wanted, f"--batches {batches}: too few prompts for it")
    _, _, device = ranks.set_up()
    tokenizer = engines.load_tokenizer(args)
    sampler = sampling.Sampler(args, tokenizer)
    policy = engines.load_model(args, tokenizer).to(device)
    values_of = [problem.prompt for problem in others + problems]
    others = sample_episodes(sampler, tokenizer, others, 1, temperature, seed)
    episodes = sample_episodes(sampler, tokenizer, problems, group_size, temperature, seed + 1)

    # the table of facts, then the exact gradient, by halves
    table = fact_table(policy, tokenizer, others, temperature)
    values = {prompt: exact_values(prompt, table) for prompt in values_of}  # (S, 11) each
    halves = []
    for half in (others[: len(others) // 2], others[len(others) // 2 :]):
        for lines, results in result_probabilities(policy, tokenizer, half, temperature):
            after = [values[episode.problem.prompt][line + 1] for episode, line in lines]  # (11,)
            (results * torch.stack(after).to(results)).sum().backward()
        halves.append(flat_gradient(policy) / len(half))

    ends = [e.ends for e in episodes]
    draws = roll_out(sampler, tokenizer, episodes, ends, k, temperature, (seed, "rollouts"))

    mean_reward = statistics.mean(e.reward for e in others)
    chains = statistics.mean(e.digits is not None for e in others)
    start_values = [values[e.problem.prompt][0, e.digits[0]].item() for e in others if e.digits]
    agreement = torch.cosine_similarity(*halves, dim=0).item()
    seen = (table[:, :10].sum(dim=-1) > 0).sum()
    print(f"\nproper chains {chains:.4f}; facts seen {seen} of 160")
    print(
        f"mean exact V(prompt) {statistics.mean(start_values):.4f}, mean reward {mean_reward:.4f}"
    )
    print(f"exact gradient: cosine of its two halves {agreement:.3f}\n")
    engine, exact = (sampler, policy, tokenizer), (halves[0] + halves[1]) / 2
    return Study(*engine, episodes, draws, table, values, halves, exact, chains, mean_reward)


def known_values(study: Study, e: Episode) -> list[float]:
    """Exact values of the states in which its steps start; 0 for a response that is not a chain."""
    if not e.digits:
        return [0.0] * len(e.ends)
    return [study.values[e.problem.prompt][i, d].item() for i, d in enumerate(e.digits)]


def cosine(
    study: Study, logprobs: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor
) -> float:
    """Between the exact gradient and that of mean over tokens of advantage x log-prob (b, T)."""
    loss = (logprobs * advantages.to(study.policy.device)).sum() / mask.sum()
    loss.backward(retain_graph=True)
    return torch.cosine_similarity(flat_gradient(study.policy), study.exact, dim=0).item()


def main(
    model: str = "runs/sft/hf",
    batches: int = 16,
    num_prompts: int = 8,
    group_size: int = 8,
    exact_episodes: int = 4096,
    ks: tuple[int, ...] = (1, 3, 9),
    temperature: float = 0.6,
    seed: int = 1,
) -> None:
    """Gradients of `batches` x num_prompts x group_size episodes. The exact gradient and the table
    of facts come from exact_episodes other ones, each with a prompt of its own."""
    require(min(ks) > 0, f"--ks {ks}: each must be at least 1")
    args = vineppo.Args(model=model, dtype="float32", gpu_memory_utilization=0.4)
    args.num_prompts, args.group_size, args.k = num_prompts, group_size, max(ks)
    args.temperature, args.seed = temperature, seed
    study = make_study(args, batches, exact_episodes)
    policy, episodes = study.policy, study.episodes
    equals = study.tokenizer.convert_tokens_to_ids("=")
    cosines: dict[str, list[list[float]]] = {}
    size = num_prompts * group_size
    for first in tqdm(range(0, len(episodes), size), desc="estimators"):
        batch, draws = episodes[first : first + size], study.draws[first : first + size]
        inputs = pad(batch, policy.device)
        mask = inputs[-1].cpu()
        rewards = torch.tensor([e.reward for e in batch])
        ends = [e.ends for e in batch]
        of_k = {
            k: [[sum(d.reward for d in of[:k]) / k for of in states] for states in draws]
            for k in ks
        }
        known = [known_values(study, e) for e in batch]

        known_at = torch.zeros_like(mask)  # value of the state before each token
        for row, e in enumerate(batch):
            for i, (start, end) in enumerate(itertools.pairwise([0, *e.ends])):
                known_at[row, start:end] = known[row][i]
                if e.digits and i < len(e.digits) - 1:  # the result is known after its token
                    known_at[row, e.ids.index(equals, start) + 2 : end] = known[row][i + 1]
        estimates = {
            "constant baseline": (rewards[:, None] - study.mean_reward) * mask,
            "GRPO": grpo.compute_advantages(rewards, group_size, mask),
            "RLOO": rloo.compute_advantages(rewards, group_size, mask),
            "PPO, exact values as critic": ppo.compute_advantages(
                rewards, known_at, mask, 1.0, 1.0
            ),
            "VinePPO, exact values": vineppo.compute_advantages(rewards, known, ends, mask),
        }
        for k in ks:
            measured = vineppo.compute_advantages(rewards, of_k[k], ends, mask)
            estimates[f"VinePPO, K = {k}"] = measured
        logprobs = vineppo.compute_logprobs(policy, *inputs, temperature)
        for name, advantages in estimates.items():
            both = advantages, vineppo.whiten(advantages, mask)
            found = [cosine(study, logprobs, used, mask) for used in both]
            cosines.setdefault(name, []).append(found)

    print(f"\ncosine of {size} episodes' gradient with the exact one,")
    print(f"{batches} batches: mean, standard error; advantages as they are, and whitened\n")
    for name, pairs in cosines.items():
        plain, whitened = (
            f"{statistics.mean(x):.3f} +- {statistics.stdev(x) / math.sqrt(batches):.3f}"
            for x in zip(*pairs, strict=True)
        )
        print(f"{name:28} {plain}   {whitened}")


if __name__ == "__main__":
    tyro.cli(main)
