"""RestEM: sample, keep the right responses, fine-tune the SFT checkpoint on them, and again.

    data = responses of the newest policy with reward 1                      Singh et al.; App. C.5
    loss = - mean over data of the mean over tokens of log policy(token)     Eq. 19, tokens averaged
           each iteration starts again from the SFT checkpoint
    newest policy = found by a walk along its checkpoints, from step 0: the last one before accuracy
           on validation problems first fails to rise

    python restem.py                                     embedded task, one process, CPU or GPU
    torchrun --nproc-per-node 8 restem.py                eight ranks; docs/restem.md has more

Shapes: P prompts, G responses per prompt, B = P * G, T tokens of the longest response,
L tokens of the longest prompt + response.
Tensors of tokens are (B, T): response only, padded on the right, index t = response token t.
Variables: b_ is the whole batch, mb_ a minibatch. Every rank (process) holds all of both; common/
divides the work among the ranks. A small letter in a shape, such as b, is a part of the batch.

Left out on purpose: advantages, KL, de-duplication of responses, a limit per prompt.
"""

# ==== 1. imports ==================================================================================
import copy
import gc
import math
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from common import batches, data, engines, flags, grading, ranks, run, sampling


# ==== 2. arguments (model, task, engines, evaluation, checkpoints: common/flags.py) ===============
@dataclass
class Args(flags.Training):
    # sampling
    num_prompts: int = 40
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
    num_iterations: int = 4
    """rounds of sampling, then fine-tuning from the SFT checkpoint; each has its own schedule"""
    learning_rate: float = 6e-5
    """the highest learning rate, at the end of a linear warm-up; then it falls to 0"""
    warmup_fraction: float = 0.03
    """share of an iteration's gradient steps in which the learning rate rises"""
    update_epochs: int = 8
    """training passes over an iteration's right responses"""
    minibatch_size: int = 16
    """responses per gradient step, over all ranks"""
    max_grad_norm: float = 1.0
    """gradients of a larger norm are scaled down to this one"""

    # evaluation and checkpoints
    eval_every: int = 10
    """gradient steps between evaluations; training stops at the first that is not a new best"""
    save_every: int = 1
    """iterations between checkpoints; the last iteration always has one"""

    def __post_init__(self) -> None:
        flags.require(self.eval_every > 0, "--eval-every must be at least 1, to select weights")
        flags.require(
            self.zero_stage < 3,
            "--zero-stage 3: RestEM reloads whole weights, which stage 3 splits; take 0 or 2",
        )


# ==== 3. selection ================================================================================
def select_checkpoint(accuracies: list[float]) -> int:
    """The walk: go on from the first accuracy while the next one is higher; where it ends."""
    chosen = 0
    while chosen + 1 < len(accuracies) and accuracies[chosen + 1] > accuracies[chosen]:
        chosen += 1
    return chosen


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


def compute_sft_loss(
    logprobs: torch.Tensor, response_mask: torch.Tensor, num_responses: int
) -> torch.Tensor:
    """A micro-batch's part of its minibatch's loss: (b, T) -> (). Long and short responses weigh
    the same; `num_responses` counts the whole minibatch, over all ranks and micro-batches."""
    return -(logprobs.sum(dim=1) / response_mask.sum(dim=1)).sum() / num_responses


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
    args = replace(args, num_prompts=min(args.num_prompts, len(problems)))  # no prompt twice

    # ==== 5.1 start, or go on from the newest checkpoint ==========================================
    start = logger.open({}, args.num_iterations)  # only weights pass from one to the next
    if start:
        model = engines.load_model(args, tokenizer, f"{logger.checkpoints.path(start)}/hf")
    sampler.wake(model.to(device))
    ranks.say(f"{args.num_prompts} prompts x {args.group_size} responses, on {world_size} ranks")

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

        # ==== 6.4 keep the right ones: N of B =====================================================
        logger.phase("logprobs")
        batch = batches.Batch(b_prompt_ids, b_response_ids, args.micro_batch_tokens, device)
        response_mask = batch.response_mask
        logprobs = batch.map(lambda *x, model=model: compute_logprobs(model, *x, args.temperature))
        metrics["policy/sampler_gap"] = sampling.measure_gap(samples, logprobs, response_mask)
        record = {"logprobs": logprobs, "input_ids": batch.input_ids, "mask": response_mask}
        logger.check(metrics, **record)
        kept = (b_rewards == 1).nonzero().flatten().tolist()  # (N,) rows
        mb_size = min(args.minibatch_size, len(kept))
        num_updates = math.ceil(args.update_epochs * len(kept) / max(1, mb_size))

        # ==== 6.5 start again: the SFT checkpoint, a new optimizer ================================
        logger.phase("restart")
        sampler.sleep()
        policy = model = loss = None  # the loss holds its graph, which holds weights
        gc.collect()  # frees the last engine before the next one is made
        model = engines.load_model(args, tokenizer)
        policy = engines.initialize(model, args)

        # ==== 6.6 update: minibatches x micro-batches, and the walk along the checkpoints =========
        updates: list[dict[str, float]] = []
        accuracies: list[float] = []
        for update in range(num_updates + 1):
            if update % args.eval_every == 0 or update == num_updates:
                logger.phase("evaluate")
                sampler.wake(policy.module)
                seed = ranks.seed_of(args.seed, iteration, "evaluate")
                scores = sampler.evaluate(eval_problems, eval_prompts, task.grading_rule, seed)
                accuracies.append(sum(scores) / len(scores))
                sampler.sleep()
                ranks.say(f"walk: step {update} of {num_updates}: {accuracies[-1]:.3f}")
                if select_checkpoint(accuracies) < len(accuracies) - 1:
                    break
                chosen = {name: x.cpu().clone() for name, x in policy.module.state_dict().items()}
                metrics["walk/chosen_update"] = update
            if update == num_updates:
                break
            logger.phase("update")
            drawn = ranks.draw(len(kept), update * mb_size, mb_size, args.seed, iteration, "update")
            mb_rows = [kept[index] for index in drawn]
            total = torch.zeros(1)
            passes = batch.passes(mb_rows)
            for i, (rows, weight) in enumerate(passes):
                inputs = batch.take(rows)
                logprobs = compute_logprobs(policy, *inputs, args.temperature)
                loss = compute_sft_loss(logprobs, inputs[-1], mb_size) * weight
                policy.set_gradient_accumulation_boundary(i == len(passes) - 1)
                policy.backward(loss * world_size)  # DeepSpeed averages over ranks
                total += loss.detach().cpu()
            dist.all_reduce(total)
            lr = learning_rate_at(update, num_updates, args.learning_rate, args.warmup_fraction)
            means = {"loss/sft": total.item(), "learning_rate": lr}
            means["policy/grad_norm"] = engines.step(policy, lr)
            logger.check(means, **record, minibatch=torch.tensor(mb_rows))
            updates.append(means)

        # ==== 6.7 weights to the sampler: of the chosen checkpoint ================================
        logger.phase("sync")
        policy.module.load_state_dict(chosen)
        sampler.wake(policy.module)

        # ==== 6.8 log, evaluate, save =============================================================
        done = iteration + 1
        is_last = done == args.num_iterations
        metrics |= run.mean_of(updates)
        metrics["eval/pass@1"] = max(accuracies)  # the chosen one's: accuracy rose up to it
        metrics["walk/kept"] = len(kept)
        metrics["walk/updates"] = len(updates)
        metrics["walk/evaluations"] = len(accuracies)
        metrics["policy/weight_distance"] = engines.weight_distance(policy.module, ref_model)
        logger.log(done, metrics)
        if done % args.save_every == 0 or is_last or logger.stopping:
            logger.save(done, {}, policy.module, tokenizer)
        policy.destroy()
    logger.close()


# ==== 7. run ======================================================================================
if __name__ == "__main__":
    main(flags.parse(Args))
