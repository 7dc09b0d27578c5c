"""PPO: a second network, the critic, learns to predict the values of states.

    V_t = critic(prompt + first t response tokens)              a value for every token
    A_t = sum_l (gamma * lambda)^l delta_{t+l}                               GAE; paper, Eq. 13-16
          delta_t = r_t + gamma * V_{t+1} - V_t;  r_t = R at the last token, else 0
    loss = clipped surrogate(A) + kl_coef * KL(policy, SFT checkpoint)               paper, App. A
    value loss = mean of max((V_t - G_t)^2, (clip(V_t) - G_t)^2) / 2                paper, Eq. 11-12
          G_t = A_t + V_t, V_t from before the update; R, as in the paper, at gamma = lambda = 1

    python ppo.py                                        embedded task, one process, CPU or GPU
    torchrun --nproc-per-node 8 ppo.py                   eight ranks; docs/ppo.md has more

Shapes: P prompts, G responses per prompt, B = P * G, T tokens of the longest response,
L tokens of the longest prompt + response.
Tensors of tokens are (B, T): response only, padded on the right, index t = response token t.
Variables: b_ is the whole batch, mb_ a minibatch. Every rank (process) holds all of both; common/
divides the work among the ranks. A small letter in a shape, such as b, is a part of the batch.

Left out on purpose: reward model, LoRA, entropy bonus, adaptive KL, async sampling.
"""

# ==== 1. imports ==================================================================================
import copy
import math
from dataclasses import dataclass

import torch
import torch.distributed as dist

from common import batches, data, engines, flags, grading, ranks, run, sampling, steps


# ==== 2. arguments (model, task, engines, evaluation, checkpoints: common/flags.py) ===============
@dataclass
class Args(flags.Training):
    # sampling
    num_prompts: int = 8
    """prompts of an iteration, over all ranks (processes)"""
    group_size: int = 8
    """responses sampled for each prompt (TRL: num_generations, verl: rollout.n)"""
    max_response_len: int = 80
    """most tokens of a response, the end token EOS included; one that is cut off has reward 0"""
    temperature: float = 0.6
    """logits are divided by this, in sampling and in training; higher: more varied responses"""
    top_p: float = 1.0
    """nucleus sampling: only the likeliest tokens of this total probability; training ignores it"""

    # optimisation
    num_iterations: int = 20
    """rounds of sampling, then training; the learning rate falls to 0 over all of them"""
    learning_rate: float = 1.2e-4
    """the highest learning rate, at the end of a linear warm-up"""
    warmup_fraction: float = 0.03
    """share of all gradient steps in which the learning rate rises"""
    update_epochs: int = 2
    """training passes over an iteration's responses (TRL: num_iterations, verl: ppo_epochs)"""
    minibatch_size: int = 16
    """responses per gradient step, over all ranks (verl: ppo_mini_batch_size * rollout.n)"""
    max_grad_norm: float = 1.0
    """gradients of a larger norm are scaled down to this one"""

    # policy loss
    clip_coef: float = 0.2
    """PPO's clip: no gain where a token's probability ratio moves further from 1 than this"""
    kl_coef: float = 1e-4
    """weight of the KL to the SFT checkpoint: a SUM over tokens, then a mean over responses"""

    # advantage estimation
    critic_learning_rate: float = 1e-3
    """the critic's highest learning rate; it rises and falls with the policy's"""
    gamma: float = 1.0
    """discount per token: a reward n tokens later counts gamma^n times"""
    gae_lambda: float = 1.0
    """with gamma 1, at 1 the advantage is R - V, at 0 the change in value over one token"""
    clip_coef_value: float = 0.2
    """a value that the update has moved by more than this gets no gradient to move further"""


# ==== 3. advantages ===============================================================================
def compute_advantages(
    rewards: torch.Tensor,
    values: torch.Tensor,
    response_mask: torch.Tensor,
    gamma: float,
    gae_lambda: float,
) -> torch.Tensor:
    """GAE: how much better a token turned out than its state's value, averaged over horizons.

    rewards (B,); values (B, T) of the states before each token; response_mask (B, T)
    -> advantages (B, T), 0 on padding.
    """
    next_masks = torch.nn.functional.pad(response_mask[:, 1:], (0, 1))  # 0 at the last token
    next_values = values.roll(-1, dims=1) * next_masks  # the state after the last token is terminal
    token_rewards = rewards[:, None] * (response_mask - next_masks)
    deltas = (token_rewards + gamma * next_values - values) * response_mask
    advantages = torch.zeros_like(values)
    running = torch.zeros_like(rewards)
    for t in reversed(range(values.shape[1])):
        running = deltas[:, t] + gamma * gae_lambda * running
        advantages[:, t] = running
    return advantages


def whiten(advantages: torch.Tensor, response_mask: torch.Tensor) -> torch.Tensor:
    """(B, T) -> (B, T), mean 0 and variance 1 over all response tokens; all equal gives 0. (The
    official code does this per micro-batch, so its result depends on how the batch is cut.)"""
    values = advantages[response_mask.bool()]
    if values.max() == values.min():
        return torch.zeros_like(advantages)
    return (advantages - values.mean()) / (values.var() + 1e-8).sqrt() * response_mask


def compute_values(
    model: torch.nn.Module,
    input_ids: torch.Tensor,
    prompt_lens: torch.Tensor,
    response_mask: torch.Tensor,
) -> torch.Tensor:
    """(b, L), (b,), (b, T) -> (b, T) values of the states before each response token, 0 on padding:
    they are read one position earlier, like the token's log-prob."""
    values = model(input_ids, use_cache=False).logits.squeeze(-1).float()  # (b, L)
    row, t = response_mask.nonzero(as_tuple=True)
    read = values[row, prompt_lens[row] + t - 1]
    return torch.zeros_like(response_mask).index_put((row, t), read)


def compute_value_loss(
    new_values: torch.Tensor,
    old_values: torch.Tensor,
    returns: torch.Tensor,
    response_mask: torch.Tensor,
    num_tokens: int,
    clip_coef_value: float,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """A micro-batch's part of its minibatch's value loss, and sums over its tokens for the log.
    Tensors are (b, T); `num_tokens` counts the whole minibatch, as in the policy loss."""
    clipped = old_values + (new_values - old_values).clamp(-clip_coef_value, clip_coef_value)
    error, clipped_error = (new_values - returns).square(), (clipped - returns).square()
    loss = 0.5 * torch.max(error, clipped_error)
    moved = (new_values - old_values).abs() > clip_coef_value  # rounding must not count
    sums = {"loss/value": loss, "value/clip_fraction": (moved & (clipped_error > error)).float()}
    sums = {name: (x.detach() * response_mask).sum() for name, x in sums.items()}
    return (loss * response_mask).sum() / num_tokens, sums


# ==== 4. log-probs, loss, schedule ================================================================
def compute_logprobs(
    model: torch.nn.Module,
    input_ids: torch.Tensor,
    prompt_lens: torch.Tensor,
    response_mask: torch.Tensor,
    temperature: float,
) -> torch.Tensor:
    """(b, L), (b,), (b, T) -> (b, T) log-probs of the response tokens, 0 on padding. Logits are
    shifted against tokens only here. Padding is on the right, so causal attention never sees it."""
    output = model(input_ids, output_hidden_states=True, logits_to_keep=1, use_cache=False)
    row, t = response_mask.nonzero(as_tuple=True)  # (N,), (N,): the N response tokens
    position = prompt_lens[row] + t
    hidden = output.hidden_states[-1][row, position - 1]  # (N, H): the position before predicts it
    logprobs = engines.score(model, hidden, input_ids[row, position], temperature)
    return torch.zeros_like(response_mask).index_put((row, t), logprobs)


def compute_policy_loss(
    new_logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    ref_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    num_tokens: int,
    num_responses: int,
    clip_coef: float,
    kl_coef: float,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """A micro-batch's part of its minibatch's loss, and sums over its tokens for the log.

    Tensors are (b, T). The surrogate is divided by the tokens, the KL by the responses of the whole
    minibatch, so the gradient does not depend on how ranks and micro-batches cut it."""
    logratio = new_logprobs - old_logprobs
    ratio = logratio.exp()
    clipped = ratio.clamp(1 - clip_coef, 1 + clip_coef)
    surrogate = torch.min(advantages * ratio, advantages * clipped)
    # KL to the reference (the estimator k3), summed over tokens as in Eq. 8: a mean would be weaker
    # by the response's length. On samples of the policy its gradient is that of KL(reference,
    # policy). Clamped to 10 as in the official code; clamping d first keeps exp finite.
    d = (ref_logprobs - new_logprobs).clamp(-20, 20)
    kl = (d.exp() - d - 1).clamp(0, 10)
    loss = kl_coef * (kl * response_mask).sum() / num_responses
    loss = loss - (surrogate * response_mask).sum() / num_tokens
    sums = {
        "loss/policy": -surrogate,
        "policy/kl": kl,
        "policy/kl_clamped": (kl == 10).float(),
        "policy/approx_kl": ratio - 1 - logratio,
        "policy/clip_fraction": ((ratio - 1).abs() > clip_coef).float(),
        "policy/ratio": ratio,
    }
    return loss, {name: (x.detach() * response_mask).sum() for name, x in sums.items()}


def learning_rate_at(update: int, num_updates: int, peak: float, warmup_fraction: float) -> float:
    """Rises linearly to the peak, then falls linearly to 0. (The official rise is logarithmic.)"""
    warmup = max(1, math.ceil(warmup_fraction * num_updates))
    return peak * min((update + 1) / warmup, (num_updates - update) / max(1, num_updates - warmup))


# ==== 5. set-up ===================================================================================
def main(args: Args) -> None:
    # flags and files first, so that a mistake shows before the engines start
    _, world_size, device = ranks.set_up()
    num_responses = args.num_prompts * args.group_size  # B
    flags.check(args, num_responses)
    logger = run.Run(__file__, args)
    problems, eval_problems = data.load(args, "train"), data.load(args, "validation")
    task = data.find_task(args)
    tokenizer = engines.load_tokenizer(args)
    problems, prompts = data.fit(args, problems, tokenizer)
    eval_problems, eval_prompts = data.fit(args, eval_problems, tokenizer, args.eval_problems)

    model = engines.load_model(args, tokenizer)
    sampler = sampling.Sampler(args, tokenizer)
    ref_model = copy.deepcopy(model)  # stays in the CPU's memory
    policy = engines.initialize(model, args)
    trained = {"policy": policy}

    # ==== 5b. critic: the SFT checkpoint with a scalar head, an engine and optimizer of its own ===
    critic_model = copy.deepcopy(ref_model)
    hidden_size = critic_model.get_output_embeddings().in_features
    head = torch.nn.Linear(hidden_size, 1, dtype=critic_model.dtype)
    torch.manual_seed(ranks.seed_of(args.seed, "critic"))
    torch.nn.init.normal_(head.weight, std=(hidden_size + 1) ** -0.5)
    torch.nn.init.zeros_(head.bias)
    critic_model.set_output_embeddings(head)
    critic = trained["critic"] = engines.initialize(critic_model, args)

    # ==== 5.1 start, or go on from the newest checkpoint ==========================================
    start = logger.open(trained, args.num_iterations)
    sampler.wake(policy.module)
    updates_per_iteration = args.update_epochs * num_responses // args.minibatch_size
    num_updates = args.num_iterations * updates_per_iteration
    ranks.say(flags.describe_batch(args))

    for iteration in range(start, args.num_iterations):
        metrics: dict[str, float] = {}

        # ==== 6.1 draw prompts: each stands G times in a row ======================================
        drawn = ranks.draw(len(problems), iteration * args.num_prompts, args.num_prompts, args.seed)
        b_problem = [index for index in drawn for _ in range(args.group_size)]
        b_prompt_ids = [prompts[index] for index in b_problem]
        b_answer = [problems[index].answer for index in b_problem]

        # ==== 6.2 sample responses ================================================================
        logger.phase("sample")
        groups = sampler.generate(
            [prompts[index] for index in drawn],
            n=args.group_size,
            max_tokens=[args.max_response_len] * args.num_prompts,
            temperature=args.temperature,
            seed=(args.seed, iteration, "sample"),
            logprobs=True,
        )
        samples = [sample for group in groups for sample in group]
        b_response_ids = [sample.ids for sample in samples]
        metrics |= sampling.describe(samples)

        # ==== 6.3 rewards (B,): 1 if the answer is right and the response not cut off, else 0 =====
        logger.phase("grade")
        b_rewards = torch.tensor(grading.grade_all(tokenizer, samples, b_answer, task.grading_rule))
        metrics["rollout/reward"] = b_rewards.mean().item()

        # ==== 6.4 old log-probs (B, T); the sampler's must be the same ============================
        logger.phase("logprobs")
        batch = batches.Batch(b_prompt_ids, b_response_ids, args.micro_batch_tokens, device)
        response_mask = batch.response_mask
        old_logprobs = batch.map(lambda *x: compute_logprobs(policy, *x, args.temperature))
        metrics["policy/sampler_gap"] = sampling.measure_gap(samples, old_logprobs, response_mask)
        metrics["tokens/padding"] = batch.count_padding()

        # ==== 6.5 advantages: the critic's value of the state before each token ===================
        logger.phase("values")
        values = batch.map(lambda *x: compute_values(critic, *x))
        advantages = compute_advantages(
            b_rewards, values, response_mask, args.gamma, args.gae_lambda
        )
        b_advantages = whiten(advantages, response_mask)
        returns = (advantages + values) * response_mask  # before whitening
        # for episodes.jsonl only: the values at the starts of the reasoning steps
        step_ends = ranks.shared_map(
            lambda ids: steps.split_steps(ids, tokenizer, task.step_rule), b_response_ids
        )
        step_values = [
            [values[row, start].item() for start in [0, *ends[:-1]]]
            for row, ends in enumerate(step_ends)
        ]
        b_returns, b_errors = (x[response_mask.bool()] for x in (returns, returns - values))
        metrics["adv/value"] = values[response_mask.bool()].mean().item()
        metrics["adv/value_error"] = b_errors.abs().mean().item()
        # 1: perfect, 0: no better than a constant; left out where returns differ by rounding only
        if (variance := b_returns.var()) > 1e-8:
            metrics["adv/explained_variance"] = (1 - b_errors.var() / variance).item()

        # ==== 6.6 reference log-probs (B, T); update: epochs x minibatches x micro-batches ========
        logger.phase("logprobs")
        sampler.sleep()  # else a GPU may have no room for the reference model
        with engines.lend(ref_model, device):
            ref_logprobs = batch.map(lambda *x: compute_logprobs(ref_model, *x, args.temperature))
        record = {"old_logprobs": old_logprobs, "ref_logprobs": ref_logprobs}
        record |= {"advantages": b_advantages, "input_ids": batch.input_ids, "mask": response_mask}
        logger.check(metrics, **record)

        logger.phase("update")
        updates: list[dict[str, float]] = []
        for epoch in range(args.update_epochs):
            for mb_rows in ranks.minibatches(
                num_responses, args.minibatch_size, args.seed, iteration, epoch
            ):
                mb_tokens = max(1, sum(batch.response_lens[row] for row in mb_rows))
                mb_sums: dict[str, torch.Tensor] = {}
                passes = batch.passes(mb_rows)
                for i, (rows, weight) in enumerate(passes):
                    *inputs, old, ref, adv = batch.take(
                        rows, old_logprobs, ref_logprobs, b_advantages
                    )
                    loss, sums = compute_policy_loss(
                        compute_logprobs(policy, *inputs, args.temperature),
                        old,
                        ref,
                        adv,
                        inputs[-1] * weight,
                        mb_tokens,
                        args.minibatch_size,
                        args.clip_coef,
                        args.kl_coef,
                    )
                    policy.set_gradient_accumulation_boundary(i == len(passes) - 1)
                    policy.backward(loss * world_size)  # DeepSpeed averages over ranks
                    mb_sums = {name: mb_sums.get(name, 0) + x for name, x in sums.items()}
                totals = torch.stack(list(mb_sums.values())).cpu()
                dist.all_reduce(totals)
                means = dict(zip(mb_sums, (totals / mb_tokens).tolist(), strict=True))
                update = iteration * updates_per_iteration + len(updates)
                lr = learning_rate_at(update, num_updates, args.learning_rate, args.warmup_fraction)
                means["learning_rate"] = lr
                means["policy/skipped"] = float(means["policy/ratio"] > 10)  # as the official code
                if means["policy/skipped"]:
                    engines.discard_gradients(policy)
                else:
                    means["policy/grad_norm"] = engines.step(policy, lr)
                logger.check(means, **record, minibatch=torch.tensor(mb_rows))
                updates.append(means)

                # ==== 6.6b critic: the same minibatch ============================================
                mb_sums = {}
                for i, (rows, weight) in enumerate(passes):
                    *inputs, old, target = batch.take(rows, values, returns)
                    loss, sums = compute_value_loss(
                        compute_values(critic, *inputs),
                        old,
                        target,
                        inputs[-1] * weight,
                        mb_tokens,
                        args.clip_coef_value,
                    )
                    critic.set_gradient_accumulation_boundary(i == len(passes) - 1)
                    critic.backward(loss * world_size)
                    mb_sums = {name: mb_sums.get(name, 0) + x for name, x in sums.items()}
                totals = torch.stack(list(mb_sums.values())).cpu()
                dist.all_reduce(totals)
                means |= dict(zip(mb_sums, (totals / mb_tokens).tolist(), strict=True))
                lr = learning_rate_at(
                    update, num_updates, args.critic_learning_rate, args.warmup_fraction
                )
                means["value/grad_norm"] = engines.step(critic, lr)
                logger.check(means, **record, values=values, returns=returns)

        # ==== 6.7 weights to the sampler ==========================================================
        logger.phase("sync")
        sampler.wake(policy.module)

        # ==== 6.8 log, evaluate, save =============================================================
        done = iteration + 1
        is_last = done == args.num_iterations
        metrics |= run.mean_of(updates)
        if args.eval_every and (done % args.eval_every == 0 or is_last):
            logger.phase("evaluate")
            seed = ranks.seed_of(args.seed, iteration, "evaluate")
            scores = sampler.evaluate(eval_problems, eval_prompts, task.grading_rule, seed)
            metrics["eval/pass@1"] = sum(scores) / len(scores)
            metrics["policy/weight_distance"] = engines.weight_distance(policy.module, ref_model)
        logger.log(done, metrics)
        spread = [max(values) - min(values) for values in step_values]
        for row in [spread.index(max(spread)), *range(0, num_responses, args.group_size)[:3]]:
            logger.episode(
                done,
                problems[b_problem[row]].prompt,
                steps.step_texts(b_response_ids[row], step_ends[row], tokenizer),
                step_values[row],
                [advantages[row, end - 1].item() for end in step_ends[row]],
                b_rewards[row].item(),
            )
        if done % args.save_every == 0 or is_last or logger.stopping:
            logger.save(done, trained, policy.module, tokenizer)
    logger.close()


# ==== 7. run ======================================================================================
if __name__ == "__main__":
    main(flags.parse(Args))
