"""What is a response worth? The noise of each estimator's policy gradient, from one checkpoint.

    python -m analysis.worth --model runs/sft/hf --output worth.json

An estimator without bias is right on average; its responses differ in how far off each one is. One
response of VinePPO is worth W of RLOO's where RLOO needs W times as many for a gradient as near to
the exact one: W is the ratio of the two variances (sums over all parameters). GRPO's gradient has
another mean; it is worth as many of RLOO's as bring the same cosine with the exact gradient.

For problems that recipes/chains.py writes: --task jsonl --data-dir, --max-response-len and
--max-model-len. Beside the measured worth stands the one that analysis/predict.py expects of the
policy's table of facts and the sizes of its tokens' scores.
"""

import json
import os
import statistics
from dataclasses import dataclass

import torch
from tqdm import tqdm

import grpo
import rloo
import vineppo
from analysis import predict
from analysis.allocation import Response, shared, with_group
from analysis.allocation import own as plain_values
from analysis.exact import OPS, read_prompt
from analysis.gradient import (
    Episode,
    Study,
    flat_gradient,
    known_values,
    make_study,
    pad,
    roll_out,
)
from common import data, flags, require, steps
from experiments import vineppo_cheap, vineppo_tree, vineppo_unsure
from given.folder import check_output

BLOCKS = 8  # of groups: the jackknife leaves out one after another


@dataclass
class Worth(vineppo.Args):
    groups: int = 64
    """groups of responses, each of another prompt"""
    k: int = 3
    """rollouts per state: 1, 3 and this number are compared (noise is a + b / K: others follow)"""
    exact_episodes: int = 4096
    """responses from which the exact gradient is computed"""
    tree: bool = True
    """measure the fork that trains on its rollouts too (K = 1); it takes the most time"""
    dtype: str = "float32"
    """of the model"""
    output: str = "worth.json"
    """JSON file for the results; tokens are in those of RLOO's responses"""


# ---- moments -------------------------------------------------------------------------------------


def variance(sums: torch.Tensor, squares: torch.Tensor, counts: torch.Tensor) -> float:
    """Of one group's gradient, summed over parameters. In blocks of groups: sums of the gradients
    (n, P), sums of their squared norms (n,), numbers of groups (n,)."""
    count = counts.sum()
    mean = sums.sum(dim=0) / count
    return ((squares.sum() - count * mean.dot(mean)) / (count - 1)).item()


def noise_of_a_response(rloos: dict, size: int, square: float) -> float:
    """Variance of the mean gradient of N responses (N / size groups) times N, in squared norms of
    the exact gradient."""
    return variance(rloos["sums"], rloos["squares"], rloos["counts"]) * size / square


def slope(sums: torch.Tensor, counts: torch.Tensor, exact: torch.Tensor, square: float) -> float:
    """Of the mean gradient along the exact one: 1 for an estimator without bias."""
    return ((sums.sum(dim=0) / counts.sum()).dot(exact) / square).item()


def worth(ours: dict, rloos: dict, left: list[int], exact: torch.Tensor, square: float) -> float:
    """A response's worth in RLOO's, by the blocks that are `left`."""
    counts = ours["counts"][left]
    theirs = variance(rloos["sums"][left], rloos["squares"][left], counts)
    own = variance(ours["sums"][left], ours["squares"][left], counts)
    if ours["unbiased"]:
        return theirs / own
    # cosine^2 of one block's mean, then the size of RLOO's block that has the same
    size = counts.float().mean()
    norms = (ours["sums"][left] / counts[:, None]).square().sum(dim=1).mean()
    cosine2 = slope(ours["sums"][left], counts, exact, square) ** 2 * square / norms
    return (theirs / (square * (1 / cosine2 - 1)) / size).item()


def jackknife(measure, blocks: int) -> tuple[float, float]:
    """(value, standard error) of measure(blocks that are left)."""
    whole = list(range(blocks))
    found = [measure([i for i in whole if i != out]) for out in whole]
    middle = statistics.mean(found)
    error = ((blocks - 1) / blocks * sum((x - middle) ** 2 for x in found)) ** 0.5
    return measure(whole), error


# ---- estimators ----------------------------------------------------------------------------------


def tree_gradient(
    policy, tokenizer, episodes: list[Episode], draws: list, advantages, temperature: float
) -> tuple[torch.Tensor, int]:
    """Of vineppo_tree with K = 1, each branch as a row of its own; and its rollouts' tokens."""
    rows, credit, tokens = [], [], 0
    for row, (e, of_states) in enumerate(zip(episodes, draws, strict=True)):
        weights = vineppo_tree.weigh(0, e.ids, e.ends, 1)
        rows.append(e)
        credit.append([a * w for a, w in zip(advantages[row].tolist(), weights, strict=False)])
        for start, (draw, *_) in zip([0, *e.ends[:-1]], of_states, strict=True):
            (given,) = vineppo_tree.compare_siblings([draw.reward], e.reward)
            branch = e.ids[:start] + draw.ids
            ends = steps.split_steps(branch, tokenizer, "line")
            weights = vineppo_tree.weigh(start, branch, ends, 1)
            rows.append(e._replace(ids=branch))
            credit.append([0.0] * start + [given * w for w in weights])
            tokens += len(draw.ids)
    for first in range(0, len(rows), 64):
        inputs = pad(rows[first : first + 64], policy.device)
        given = torch.zeros_like(inputs[-1])
        for i, of_row in enumerate(credit[first : first + 64]):
            given[i, : len(of_row)] = torch.tensor(of_row)
        (vineppo.compute_logprobs(policy, *inputs, temperature) * given).sum().backward()
    return flat_gradient(policy), tokens


def weigh_scores(study: Study, temperature: float, count: int = 150) -> dict[str, float]:
    """{kind of token: mean |score|^2}: of results, in units of that with respect to their logits;
    of the other words of a line, together. From one token of each of `count` responses."""
    equals = study.tokenizer.convert_tokens_to_ids("=")
    found: dict[str, list[float]] = {"results": [], "logits": [], "words": []}
    for i, e in enumerate([e for e in study.episodes if e.digits][:count]):
        line = i % (len(e.ends) - 1)
        start, end = [0, *e.ends][line], e.ends[line]
        result = e.ids.index(equals, start) + 1
        *inputs, mask = pad([e], study.policy.device)
        for kind, places in (("results", [result]), ("words", {*range(start, end)} - {result})):
            only = torch.zeros_like(mask)
            only[0, list(places)] = 1
            logprobs = vineppo.compute_logprobs(study.policy, *inputs, only, temperature)
            logprobs.sum().backward()
            found[kind].append(flat_gradient(study.policy).square().sum().item())
        op, operand = read_prompt(e.problem.prompt)[1][line]
        of = study.table[OPS.index(op), e.digits[line], operand]
        found["logits"].append(predict.score_of(of, e.digits[line + 1]))
    totals = {kind: sum(squares) for kind, squares in found.items()}
    words = totals["words"] / len(found["words"])
    return {"results": totals["results"] / totals["logits"], "words": words}


def main(args: Worth) -> None:
    size, ks = args.group_size, sorted({1, 3, args.k})
    require(args.groups % BLOCKS == 0, f"--groups {args.groups}: must be a multiple of {BLOCKS}")
    require(args.k >= 3, f"--k {args.k}: must be at least 3")
    check_output(args.output)
    args.num_prompts = args.groups // BLOCKS
    study = make_study(args, BLOCKS, args.exact_episodes)
    policy, tokenizer, seed = study.policy, study.tokenizer, (args.seed, "unsure")
    defaults = vineppo_unsure.Args()
    limits = defaults.unsure_below, defaults.unsure_per_step
    cuts = [vineppo_unsure.split_where_unsure(e.logprobs, *limits) for e in study.episodes]
    options = study.sampler, tokenizer, study.episodes, cuts, 3, args.temperature, seed
    cut_draws = roll_out(*options)
    exact, square = study.exact.cpu(), study.halves[0].dot(study.halves[1]).item()
    found: dict[str, dict] = {}

    def add(name: str, gradient: torch.Tensor, tokens: int, trained: int, unbiased=True) -> None:
        gradient = gradient.cpu() / size  # a response's mean
        if name not in found:
            sums = torch.zeros(BLOCKS, gradient.numel())
            empty = {"squares": torch.zeros(BLOCKS), "counts": torch.zeros(BLOCKS)}
            found[name] = {"sums": sums, "tokens": 0, "trained": 0, "unbiased": unbiased, **empty}
        found[name]["sums"][block] += gradient
        found[name]["squares"][block] += gradient.dot(gradient)
        found[name]["counts"][block] += 1
        found[name]["tokens"] += tokens
        found[name]["trained"] += trained

    for group in tqdm(range(args.groups), desc="gradients"):
        rows, block = slice(group * size, group * size + size), group * BLOCKS // args.groups
        episodes, draws = study.episodes[rows], study.draws[rows]
        rewards = torch.tensor([e.reward for e in episodes])
        own = sum(len(e.ids) for e in episodes)
        inputs = pad(episodes, policy.device)
        mask = inputs[-1].cpu()
        logprobs = vineppo.compute_logprobs(policy, *inputs, args.temperature)

        def gradient(advantages, logprobs=logprobs):
            (logprobs * advantages.to(logprobs)).sum().backward(retain_graph=True)
            return flat_gradient(policy)

        def respond(ends, draws, group=group, episodes=episodes):
            rows = zip(episodes, ends, draws, strict=True)
            return [Response(group, e.ids, of, e.reward, drawn) for e, of, drawn in rows]

        def vine(ends, values, smoothing=0.0, rewards=rewards, mask=mask):
            return vineppo_cheap.compute_advantages(rewards, values, ends, mask, smoothing)

        ends = [e.ends for e in episodes]
        batch = respond(ends, draws)
        add("RLOO", gradient(rloo.compute_advantages(rewards, size, mask)), own, own)
        add("GRPO", gradient(grpo.compute_advantages(rewards, size, mask)), own, own, False)
        known = [known_values(study, e) for e in episodes]
        add("exact values", gradient(vine(ends, known)), own, own)
        for k in ks:
            values, tokens = shared(k)(batch)
            add(f"VinePPO, K = {k}", gradient(vine(ends, values)), own + tokens, own)
        values, tokens = with_group(shared(3), 3)(batch)
        add("smoothing and reuse", gradient(vine(ends, values, 0.5)), own + tokens, own)
        values, tokens = shared(3)(respond(cuts[rows], cut_draws[rows]))
        add("unsure", gradient(vine(cuts[rows], values)), own + tokens, own)
        if args.tree:
            plain, _ = plain_values(1)(batch)
            options = tokenizer, episodes, draws, vine(ends, plain), args.temperature
            tree, tokens = tree_gradient(policy, *options)
            add("tree", tree, own + tokens, own + tokens)

    problems = data.load_problems(args.task, "train", args.data_dir)[:500]
    noise, _ = predict.simulate([tuple(problem) for problem in problems], study.table, size)
    weights = weigh_scores(study, args.temperature)
    expected = {"exact values": predict.predict(noise, 0, weights)}
    expected |= {f"VinePPO, K = {k}": predict.predict(noise, k, weights) for k in ks}
    report = {
        "reward": study.mean_reward,
        "chains": study.chains,
        "steps": statistics.mean(len(e.ends) for e in study.episodes),
        "noise": noise_of_a_response(found["RLOO"], size, square),  # to compare group sizes
        "estimators": {},
    }
    for name, ours in found.items():
        value, error = jackknife(
            lambda left, ours=ours: worth(ours, found["RLOO"], left, exact, square), BLOCKS
        )
        figures = {"worth": value, "error": error}
        figures["slope"] = slope(ours["sums"], ours["counts"], exact, square)
        figures |= {key: ours[key] / found["RLOO"]["tokens"] for key in ("tokens", "trained")}
        figures |= {"expected": expected[name]} if name in expected else {}
        report["estimators"][name] = figures
        print(f"{name:20}", ", ".join(f"{key} {x:.2f}" for key, x in figures.items()))
    with open(f"{args.output}.tmp", "w") as file:
        json.dump(report, file, indent=1)
    os.replace(f"{args.output}.tmp", args.output)


Args = Worth  # flags.parse names its groups by class, so it is not called Args


if __name__ == "__main__":
    main(flags.parse(Worth))
