"""GRPO: a response is judged by the rewards of its group, the G responses to one prompt.

    A = (R - mean(group)) / (std(group) + 1e-8)  for all tokens of a response      DeepSeekMath, 4.1
        std is the population's; a group of equal rewards gives 0
    loss = clipped surrogate(A) + kl_coef * KL(policy, SFT checkpoint)               paper, App. A

    python grpo.py                                       embedded task, one process, CPU or GPU
    torchrun --nproc-per-node 8 grpo.py                  eight ranks

Shapes: P prompts, G responses per prompt, B = P * G, T tokens of the longest response,
L tokens of the longest prompt + response.
Tensors of tokens are (B, T): response only, padded on the right, index t = response token t.
Variables: b_ is the whole batch, mb_ a minibatch. Every rank (process) holds all of both; common/
divides the work among the ranks. A small letter in a shape, such as b, is a part of the batch.

Left out on purpose: value network, reward model, LoRA, entropy bonus, adaptive KL, async sampling.
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
    learning_rate: float = 6e-5
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

    # advantage estimation: no flags of its own

    def __post_init__(self) -> None:
        flags.require(self.group_size >= 2, "--group-size must be at least 2, to compare responses")


# ==== 3. advantages ===============================================================================
def compute_advantages(
    rewards: torch.Tensor,
    group_size: int,
    response_mask: torch.Tensor,
) -> torch.Tensor:
    """How many standard deviations a reward is above its group's mean, for each of its tokens.

    rewards (B,), G in a row for each prompt; response_mask (B, T) -> (B, T), 0 on padding.
    """
    groups = rewards.view(-1, group_size)  # (P, G)
    centred = groups - groups.mean(dim=1, keepdim=True)
    normalised = centred / (groups.std(dim=1, correction=0, keepdim=True) + 1e-8)
    all_equal = groups.amax(dim=1, keepdim=True) == groups.amin(dim=1, keepdim=True)
    return torch.where(all_equal, 0.0, normalised).view(-1, 1) * response_mask


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

        # ==== 6.5 advantages: from the rewards of the group, the same for every token =============
        advantages = compute_advantages(b_rewards, args.group_size, response_mask)
        b_advantages = advantages  # normalised already, so not whitened
        groups = b_rewards.view(-1, args.group_size)
        baselines = groups.mean(dim=1, keepdim=True).expand_as(groups).reshape(-1, 1)
        step_ends = [[length] for length in batch.response_lens]  # a response is one step
        step_values = baselines.tolist()
        metrics["adv/undecided"] = (groups.amax(dim=1) > groups.amin(dim=1)).float().mean().item()

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
