"""Can PPO's critic learn values at all? Here it is fitted to exact ones on the embedded task, to
check that no mistake in our code makes it fail in training.

    python -m analysis.critic --model runs/vineppo-chain-seed1/hf

The critic of ppo.py (the checkpoint with a scalar head, `compute_values`, a squared error) learns
the exact value of the state before every token of many responses, by dynamic programming: a target
without noise. It is then tested on responses to other prompts. In training, its targets are the
rewards of 1,280 responses, one each, 0 or 1, of a policy that changes.
"""

import json
import os
import statistics

import torch
import tyro
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

import ppo
from analysis.exact import exact_values
from analysis.gradient import Episode, fact_table, pad, sample_episodes
from analysis.values import measure, within_problems
from common import data, engines, ranks, sampling


def token_values(episode: Episode, values: torch.Tensor, equals: int) -> torch.Tensor:
    """(T,) exact value of the state before each token: a line's result, behind `=`, changes it."""
    found, digits = torch.empty(len(episode.ids)), episode.digits
    known = 0
    for i, start in enumerate([0, *episode.ends[:-1]]):
        found[known:] = values[i, digits[i]]
        if i + 1 < len(episode.ends):
            known = episode.ids.index(equals, start) + 2  # before it the value is the same
    return found


def main(
    model: str,
    num_responses: int = 8_000,
    epochs: int = 12,
    learning_rate: float = 1e-3,
    temperature: float = 0.6,
    seed: int = 1,
    output: str = "",
) -> None:
    """`output`: JSON file for the curve of the explained variance."""
    _, _, device = ranks.set_up()
    args = ppo.Args(model=model, dtype="float32", gpu_memory_utilization=0.4)
    tokenizer = engines.load_tokenizer(args)
    sampler = sampling.Sampler(args, tokenizer)
    policy = engines.load_model(args, tokenizer).to(device)
    problems = data.load_problems("chain", "sft")[:num_responses]
    others = data.load_problems("chain", "train")[:500]
    episodes = sample_episodes(sampler, tokenizer, problems + others, 1, temperature, seed)
    table = fact_table(policy, tokenizer, episodes, temperature)
    equals = tokenizer.convert_tokens_to_ids("=")
    known = [
        (episode, token_values(episode, exact_values(episode.problem.prompt, table), equals))
        for episode in episodes
        if episode.digits
    ]
    of_others = set(others)
    held_out = [pair for pair in known if pair[0].problem in of_others]
    train = [pair for pair in known if pair[0].problem not in of_others]

    critic = policy  # the policy is not needed any more
    torch.manual_seed(ranks.seed_of(seed, "critic"))
    head = torch.nn.Linear(critic.get_output_embeddings().in_features, 1).to(device)
    torch.nn.init.normal_(head.weight, std=(head.in_features + 1) ** -0.5)
    torch.nn.init.zeros_(head.bias)
    critic.set_output_embeddings(head)
    optimizer = torch.optim.AdamW(critic.parameters(), learning_rate, weight_decay=0.0)

    def errors(pairs) -> tuple[torch.Tensor, torch.Tensor]:
        inputs = pad([episode for episode, _ in pairs], device)
        targets = pad_sequence([values for _, values in pairs], batch_first=True).to(device)
        predicted = ppo.compute_values(critic, *inputs)
        return predicted[inputs[-1].bool()], targets[inputs[-1].bool()]

    @torch.no_grad()
    def score() -> dict[str, float]:
        batches = [errors(held_out[i : i + 64]) for i in range(0, len(held_out), 64)]
        predicted, targets = (torch.cat(some).tolist() for some in zip(*batches, strict=True))
        prompts = [e.problem.prompt for e, values in held_out for _ in values]
        rows = zip(prompts, targets, predicted, strict=True)
        states = [{"prompt": p, "truth": t, "critic": c} for p, t, c in rows]
        return measure(targets, predicted) | {"within": within_problems(states, "critic")}

    curve = [(0, score())]
    steps = [
        rows for epoch in range(epochs) for rows in ranks.minibatches(len(train), 64, seed, epoch)
    ]
    for step, rows in enumerate(bar := tqdm(steps, unit="step")):
        rate = ppo.learning_rate_at(step, len(steps), learning_rate, 0.03)
        optimizer.param_groups[0]["lr"] = rate
        predicted, targets = errors([train[row] for row in rows])
        loss = 0.5 * (predicted - targets).square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(critic.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        bar.set_postfix(loss=f"{loss.item():.4f}", refresh=False)
        if (step + 1) % 50 == 0 or step + 1 == len(steps):
            curve.append((step + 1, score()))
            bar.write(f"{curve[-1][0]} steps: explained variance {curve[-1][1]['explained']:.2f}")
    last = curve[-1][1]
    print(
        f"critic fitted to exact values of {len(train)} responses, {epochs} times: on "
        f"{len(held_out)} others MAE {last['mae']:.3f}, within 0.05 {last['close']:.0%}, "
        f"explained variance {last['explained']:.2f}, within responses {last['within']:.2f} "
        f"(mean value {statistics.mean(v for _, values in held_out for v in values.tolist()):.3f})"
    )
    if output:
        result = {"model": model, "responses": len(train), "epochs": epochs, "curve": curve}
        with open(output + ".tmp", "w") as file:
            json.dump(result, file)
        os.replace(output + ".tmp", output)


if __name__ == "__main__":
    tyro.cli(main)
