"""DPO-Positive: prefer right responses to wrong ones, without making the right ones rarer.

    d(y) = log policy(y) - log ref(y)      ref: the SFT checkpoint; log-probs summed over tokens
    z = d(right) - d(wrong) - penalty * max(0, -d(right))
    loss = - mean over pairs of log sigmoid(beta * z)                  Pal et al.; paper, Eq. 18
           A pair is a right and a wrong response to one prompt, sampled from ref. (In the paper the
           penalty is not multiplied by beta; in its code, in Pal et al. and here it is.)

    python dpo_pos.py                                    embedded task, one process, CPU or GPU
    torchrun --nproc-per-node 8 dpo_pos.py               eight ranks; docs/dpo_pos.md has more

Shapes: P prompts, G responses per prompt, B = P * G, T tokens of the longest response,
L tokens of the longest prompt + response, M pairs of a minibatch.
Tensors of tokens are (B, T): response only, padded on the right, index t = response token t.
Variables: b_ is the whole batch, mb_ a minibatch. Every rank (process) holds all of both; common/
divides the work among the ranks. A small letter in a shape, such as b, is a part of the batch.

Left out on purpose: label smoothing, further rounds of sampling, de-duplication of responses.
"""

# ==== 1. imports ==================================================================================
import copy
import functools
import json
import math
import os
import random
from array import array
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from common import batches, data, engines, flags, grading, ranks, run, sampling


# ==== 2. arguments (model, task, engines, evaluation, checkpoints: common/flags.py) ===============
@dataclass
class Args(flags.Training):
    # sampling
    num_prompts: int = 20
    """prompts, over all ranks (processes); they are sampled once, before training"""
    group_size: int = 64
    """responses sampled for each prompt (TRL: num_generations, verl: rollout.n)"""
    max_response_len: int = 80
    """most tokens of a response, the end token EOS included; one that is cut off has reward 0"""
    temperature: float = 0.6
    """logits are divided by this, in sampling and in training; higher: more varied responses"""
    top_p: float = 1.0
    """nucleus sampling: only the likeliest tokens of this total probability; training ignores it"""

    # optimisation
    learning_rate: float = 7.5e-6
    """the highest learning rate, at the end of a linear warm-up; then it falls to 0"""
    warmup_fraction: float = 0.03
    """share of all gradient steps in which the learning rate rises"""
    update_epochs: int = 3
    """training passes over the pairs"""
    minibatch_size: int = 16
    """pairs per gradient step, over all ranks"""
    max_grad_norm: float = 1.0
    """gradients of a larger norm are scaled down to this one"""

    # preference loss
    beta: float = 0.1
    """scale of the log-ratios: higher keeps the policy closer to the SFT checkpoint"""
    penalty: float = 50.0
    """penalty (lambda) on right responses that become rarer than at the start; 0 is plain DPO"""
    max_pairs: int = 64
    """most pairs of a prompt, drawn from all of a right and a wrong response"""

    # evaluation and checkpoints
    eval_every: int = 40
    """gradient steps between evaluations on validation problems; 0: never"""
    save_every: int = 40
    """gradient steps between checkpoints; the last one always has one"""

    def __post_init__(self) -> None:
        flags.require(self.group_size > 1, "--group-size must be at least 2, for a pair")


PART = 1024  # prompts sampled at a time, then written to a file


# ==== 3. pairs ====================================================================================
def make_pairs(rewards: list[float], max_pairs: int, seed: int) -> list[tuple[int, int]]:
    """(right, wrong) indices of a prompt's responses: at most `max_pairs`, drawn without repeats
    from all such pairs; none where all responses are right, or all wrong."""
    right = [i for i, reward in enumerate(rewards) if reward == 1]
    wrong = [i for i, reward in enumerate(rewards) if reward != 1]
    pairs = [(one, other) for one in right for other in wrong]
    return random.Random(seed).sample(pairs, min(max_pairs, len(pairs)))


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


def compute_dpo_positive_loss(
    logprobs: torch.Tensor,
    ref_logprobs: torch.Tensor,
    beta: float,
    penalty: float,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """(2, m) log-probs of m pairs of responses, right ones first -> (m,) losses of the pairs, and
    (m,) tensors for the log."""
    chosen, rejected = logprobs - ref_logprobs  # (m,), (m,)
    lost = torch.relu(-chosen)  # its gradient at 0, where training starts, is 0
    z = chosen - rejected - penalty * lost
    logs = {
        "dpo/chosen_logprob": logprobs[0],
        "dpo/rejected_logprob": logprobs[1],
        "dpo/chosen_logratio": chosen,
        "dpo/rejected_logratio": rejected,
        "dpo/accuracy": (chosen > rejected).float(),
        "dpo/penalised": (lost > 0).float(),
    }
    return -torch.nn.functional.logsigmoid(beta * z), logs


def learning_rate_at(update: int, num_updates: int, peak: float, warmup_fraction: float) -> float:
    """Rises linearly to the peak, then falls linearly to 0. (The official rise is logarithmic.)"""
    warmup = max(1, math.ceil(warmup_fraction * num_updates))
    return peak * min((update + 1) / warmup, (num_updates - update) / max(1, num_updates - warmup))


# ==== 5. set-up ===================================================================================
def main(args: Args) -> None:
    # flags and files first, so that a mistake shows before the engines start
    _, world_size, device = ranks.set_up()
    flags.check(args)
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
    args = replace(args, num_prompts=min(args.num_prompts, len(problems)))  # no prompt twice

    # ==== 5.1 start, or go on from the newest checkpoint ==========================================
    start = logger.open(trained, 0)  # the number of gradient steps is not known yet

    # ==== 6.1 draw prompts: each stands G times in a row ==========================================
    drawn = ranks.draw(len(problems), 0, args.num_prompts, args.seed)
    b_problem = [index for index in drawn for _ in range(args.group_size)]
    b_prompt_ids = [prompts[index] for index in b_problem]
    b_answer = [problems[index].answer for index in b_problem]

    # ==== 6.2 sample responses, or read those that a resumed run has sampled; 6.3 rewards =========
    # In parts, and ids as arrays: lists of the paper's 736,000 responses take 13 GB on each rank.
    b_response_ids, b_rewards = [], []
    for number, first in enumerate(range(0, args.num_prompts, PART)):
        part = drawn[first : first + PART]
        path = os.path.join(logger.folder, f"samples_{number:04d}.json")
        if args.resume == "no" or not ranks.from_main(functools.partial(os.path.exists, path)):
            logger.phase("sample")
            sampler.llm.reset_prefix_cache()  # a resumed run has no cache of other parts
            groups = sampler.generate(
                [prompts[index] for index in part],
                n=args.group_size,
                max_tokens=[args.max_response_len] * len(part),
                temperature=args.temperature,
                seed=(args.seed, "sample", *([number] if number else [])),
                progress=True,
            )
            if ranks.is_main():
                with open(path + ".tmp", "w") as file:
                    json.dump([sample for group in groups for sample in group], file)
                os.replace(path + ".tmp", path)
            dist.barrier()
        logger.phase("grade")
        with open(path) as file:
            samples = [sampling.Sample(*sample) for sample in json.load(file)]
        answers = b_answer[len(b_rewards) : len(b_rewards) + len(samples)]
        b_rewards += grading.grade_all(tokenizer, samples, answers, task.grading_rule)
        b_response_ids += [array("i", sample.ids) for sample in samples]
    groups = samples = []  # the last part is in b_response_ids too

    # ==== 6.3 pairs (N, 2): rows of a right and of a wrong response to one prompt =================
    pairs: list[tuple[int, int]] = []
    for first in range(0, len(b_rewards), args.group_size):
        rewards = b_rewards[first : first + args.group_size]
        seed = ranks.seed_of(args.seed, first, "pairs")
        made = make_pairs(rewards, args.max_pairs, seed)
        pairs += [(first + right, first + wrong) for right, wrong in made]
    flags.require(
        pairs, f"no prompt of {args.num_prompts} has right and wrong responses: raise --group-size"
    )

    # ==== 6.4 sequences ===========================================================================
    batch = batches.Batch(b_prompt_ids, b_response_ids, args.micro_batch_tokens, device)
    pair_lens = [2 * max(batch.lengths[row] for row in pair) for pair in pairs]  # as padded
    num_updates = math.ceil(args.update_epochs * len(pairs) / args.minibatch_size)
    logger.expect(num_updates)
    sampler.sleep()
    ref_model.to(device)  # every pass needs it
    ranks.say(
        f"{args.num_prompts} prompts x {args.group_size} responses, reward "
        f"{sum(b_rewards) / len(b_rewards):.3f}: {len(pairs)} pairs x {args.update_epochs} epochs "
        f"= {num_updates} optimizer steps of {args.minibatch_size}, on {world_size} ranks"
    )

    for iteration in range(start, num_updates):  # of one gradient step each
        # ==== 6.6 update ==========================================================================
        logger.phase("update")
        mb_pairs = ranks.draw(
            len(pairs), iteration * args.minibatch_size, args.minibatch_size, args.seed, "update"
        )
        mb_sums: dict[str, torch.Tensor] = {}
        passes = batches.plan_passes(mb_pairs, pair_lens, args.micro_batch_tokens)
        for i, (mine, weight) in enumerate(passes):
            rows = [pairs[pair][side] for side in (0, 1) for pair in mine]  # right ones first
            inputs = batch.take(rows)
            logprobs = compute_logprobs(policy, *inputs, args.temperature)  # (2m, T)
            # in the same pass, so that both round alike and are equal at the start
            with torch.no_grad():
                ref_logprobs = compute_logprobs(ref_model, *inputs, args.temperature)
            losses, logs = compute_dpo_positive_loss(
                logprobs.sum(dim=1).view(2, -1),
                ref_logprobs.sum(dim=1).view(2, -1),
                args.beta,
                args.penalty,
            )
            loss = losses.sum() * weight / args.minibatch_size
            policy.set_gradient_accumulation_boundary(i == len(passes) - 1)
            policy.backward(loss * world_size)  # DeepSpeed averages over ranks
            sums = {name: x.detach().sum() * weight for name, x in logs.items()}
            sums["loss/dpo"] = losses.detach().sum() * weight
            mb_sums = {name: mb_sums.get(name, 0) + x for name, x in sums.items()}
        totals = torch.stack(list(mb_sums.values())).cpu()
        dist.all_reduce(totals)
        metrics = dict(zip(mb_sums, (totals / args.minibatch_size).tolist(), strict=True))
        lr = learning_rate_at(iteration, num_updates, args.learning_rate, args.warmup_fraction)
        metrics["learning_rate"] = lr
        metrics["policy/grad_norm"] = engines.step(policy, lr)
        minibatch = torch.tensor([pairs[i] for i in mb_pairs])
        input_ids, *_ = batch.take(minibatch.flatten().tolist())
        logger.check(metrics, input_ids=input_ids, minibatch=minibatch)
        if iteration == 0:
            metrics["rollout/reward"] = sum(b_rewards) / len(b_rewards)
            metrics["tokens/sample"] = sum(batch.response_lens)

        # ==== 6.8 log, evaluate, save =============================================================
        done = iteration + 1
        is_last = done == num_updates
        if args.eval_every and (done % args.eval_every == 0 or is_last):
            logger.phase("evaluate")
            sampler.wake(policy.module)
            seed = ranks.seed_of(args.seed, iteration, "evaluate")
            scores = sampler.evaluate(eval_problems, eval_prompts, task.grading_rule, seed)
            metrics["eval/pass@1"] = sum(scores) / len(scores)
            sampler.sleep()
            metrics["policy/weight_distance"] = engines.weight_distance(policy.module, ref_model)
        logger.log(done, metrics)
        if done % args.save_every == 0 or is_last or logger.stopping:
            logger.save(done, trained, policy.module, tokenizer)
    logger.close()


# ==== 7. run ======================================================================================
if __name__ == "__main__":
    main(flags.parse(Args))
