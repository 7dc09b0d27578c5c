"""RLOO: a response is judged by the mean reward of the other responses to its prompt.

    A = R - mean(rewards of the other G - 1)  for all tokens of a response          Ahmadian et al.
        It is VinePPO with a single step, whose state is valued by the other responses.
    loss = clipped surrogate(A) + kl_coef * KL(policy, SFT checkpoint)               paper, App. A

    python rloo.py                                       embedded task, one process, CPU or GPU
    torchrun --nproc-per-node 8 rloo.py                  eight ranks

Shapes: P prompts, G responses per prompt, B = P * G, T tokens of the longest response,
L tokens of the longest prompt + response, V vocabulary.
Tensors of tokens are (B, T): response only, padded on the right, index t = response token t.
b_ is the whole batch, mb_ a minibatch; small letters in shapes are parts of a batch.

Left out on purpose: value network, reward model, LoRA, entropy bonus, adaptive KL, async sampling.
"""

# ==== 1. imports ==================================================================================
import copy
import math
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
import tyro
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint

from common import data, grading, require, run, sampling, steps


# ==== 2. arguments ================================================================================
@dataclass
class Args:
    # experiment
    seed: int = 1
    """decides every draw: prompts, samples, rollouts, minibatches"""
    output_dir: str = ""
    """the run's folder; default runs/<script>-<task>-seed<seed>"""
    resume: Literal["no", "auto"] = "no"
    """auto: go on from the newest checkpoint in the run's folder"""
    track: bool = False
    """log to Weights & Biases too (pip install wandb); TensorBoard files are always written"""

    # model and data
    model: str = "runs/sft/hf"
    """checkpoint to start from and to stay close to: a folder, or a name on the hub"""
    trust_remote_code: bool = False
    """run code that comes with the model: Python files, weights that are pickles (.bin)"""
    task: str = "chain"
    """chain (embedded), gsm8k, math or jsonl (your own)"""
    data_dir: str = ""
    """folder of JSONL files; without one gsm8k and math come from the hub"""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """auto: bfloat16 on a GPU, float32 on a CPU; the optimizer keeps float32 weights either way"""
    zero_stage: Literal[0, 2, 3] = 0
    """DeepSpeed ZeRO: 2 shards gradients and optimizer state over the ranks, 3 weights too"""
    max_model_len: int = 128
    """tokens of prompt + response; prompts that leave no room are dropped and counted"""
    gradient_checkpointing: bool = False
    """the backward pass computes activations again: less memory, more time"""
    tensor_parallel_size: int = 1
    """ranks that hold one vLLM engine together, for models too large for one GPU's share"""
    gpu_memory_utilization: float = 0.5
    """share of a GPU's memory for vLLM while it samples (it sleeps during the update)"""

    # sampling
    num_prompts: int = 8
    """per iteration, all ranks"""
    group_size: int = 8
    """responses per prompt (TRL: num_generations, verl: rollout.n)"""
    max_response_len: int = 80
    """tokens, EOS included"""
    temperature: float = 0.6
    """of sampling, and of every log-prob of the trainer"""
    top_p: float = 1.0
    """nucleus sampling; below 1 the sampler's distribution is not the trainer's"""
    stop: str = ""
    """a string that ends a response; its ids are cut off and no EOS is put in their place"""

    # optimisation
    num_iterations: int = 20
    """each samples, then updates; the learning rate falls to 0 over them"""
    learning_rate: float = 6e-5
    """peak, after a linear warm-up"""
    warmup_fraction: float = 0.03
    """of all gradient steps"""
    update_epochs: int = 2
    """passes over an iteration's responses (TRL: num_iterations, verl: ppo_epochs)"""
    minibatch_size: int = 16
    """responses per gradient step, all ranks (verl: ppo_mini_batch_size * rollout.n)"""
    micro_batch_tokens: int = 4096
    """tokens of one forward pass, padding included, per rank: decides memory, never results"""
    max_grad_norm: float = 1.0

    # policy loss
    clip_coef: float = 0.2
    kl_coef: float = 1e-4
    """times the mean over responses of the SUM over tokens of the KL estimate"""

    # evaluation and checkpoints
    eval_every: int = 5
    """iterations between evaluations on validation problems; 0: never"""
    eval_problems: int = 100
    eval_rounds: int = 4
    """responses per validation problem"""
    eval_temperature: float = 0.35
    save_every: int = 5
    """iterations between checkpoints; the last iteration always has one"""
    keep_checkpoints: int = 2
    """the newest ones, and the best on validation problems"""
    grace_seconds: float = 20
    """after a SIGTERM: time to finish the iteration and save it; else it is lost"""
    on_nan: Literal["stop", "skip"] = "stop"
    """NaN or infinity in a loss, gradient or log-prob: stop, or skip that minibatch and count it"""

    # advantage estimation
    norm_adv: bool = True
    """whiten the advantages over all response tokens of the iteration (Ahmadian et al. do not)"""

    def check(self) -> None:
        require(
            self.group_size >= 2, f"--group-size {self.group_size}: a group of one says nothing"
        )


# ==== 3. advantages ===============================================================================
def compute_advantages(
    rewards: torch.Tensor,
    group_size: int,
    response_mask: torch.Tensor,
) -> torch.Tensor:
    """The reward less the mean of the others of its group, for every token of the response.

    rewards (B,), G in a row for each prompt; response_mask (B, T) -> (B, T), 0 on padding.
    """
    groups = rewards.view(-1, group_size)  # (P, G)
    baselines = (groups.sum(dim=1, keepdim=True) - groups) / (group_size - 1)
    return (groups - baselines).view(-1, 1) * response_mask


def whiten(advantages: torch.Tensor, response_mask: torch.Tensor) -> torch.Tensor:
    """(B, T) -> (B, T), mean 0 and variance 1 over all response tokens; all equal gives 0. (The
    official code does this per micro-batch, so its result depends on how the batch is cut.)"""
    values = advantages[response_mask.bool()]
    if values.max() == values.min():
        return torch.zeros_like(advantages)
    return (advantages - values.mean()) / (values.var() + 1e-8).sqrt() * response_mask


# ==== 4. log-probs, loss, schedule ================================================================
def compute_logprobs(
    model: torch.nn.Module,
    input_ids: torch.Tensor,
    prompt_lens: torch.Tensor,
    response_mask: torch.Tensor,
    temperature: float,
) -> torch.Tensor:
    """(b, L), (b,), (b, T) -> (b, T) log-probs of the response tokens, 0 on padding.

    The one place where logits are shifted against tokens. Padding is on the right, where causal
    attention never looks. The head runs in chunks that the backward pass computes again: float32
    logits never exist for more than 1,024 tokens.
    """
    output = model(input_ids, output_hidden_states=True, logits_to_keep=1, use_cache=False)
    row, t = response_mask.nonzero(as_tuple=True)  # (N,), (N,): the N response tokens
    position = prompt_lens[row] + t
    hidden = output.hidden_states[-1][row, position - 1]  # (N, H): a token is predicted one before
    tokens = input_ids[row, position]  # (N,)
    head = model.get_output_embeddings()

    def logprobs_of(hidden: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        logits = head(hidden).float() / temperature  # (n, V)
        return -torch.nn.functional.cross_entropy(logits, tokens, reduction="none")

    chunks = list(zip(hidden.split(1024), tokens.split(1024), strict=True))
    if hasattr(head.weight, "ds_id"):  # ZeRO 3: all ranks gather the head for each chunk
        chunks += [(hidden[:0], tokens[:0])] * (run.largest(len(chunks)) - len(chunks))
    logprobs = [checkpoint(logprobs_of, *chunk, use_reentrant=False) for chunk in chunks]
    return torch.zeros_like(response_mask).index_put((row, t), torch.cat(logprobs))


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

    Tensors are (b, T). The denominators count the whole minibatch, all ranks and micro-batches, so
    the gradient does not depend on how it was cut: tokens for the surrogate, responses for the KL.
    """
    logratio = new_logprobs - old_logprobs
    ratio = logratio.exp()
    clipped = ratio.clamp(1 - clip_coef, 1 + clip_coef)
    surrogate = torch.min(advantages * ratio, advantages * clipped)
    # KL to the reference, k3, summed over tokens as in Eq. 8: a mean over tokens would be weaker by
    # the response's length. Its gradient on samples of the policy is that of KL(reference, policy).
    # Clamped to 10 as in the official code; the clamp of d keeps exp finite where that one is flat.
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
    """Linear warm-up, then linear to 0. (The official warm-up is logarithmic.)"""
    warmup = max(1, math.ceil(warmup_fraction * num_updates))
    return peak * min((update + 1) / warmup, (num_updates - update) / max(1, num_updates - warmup))


# ==== 5. set-up ===================================================================================
def main(args: Args) -> None:
    # flags and files first: a mistake should not wait for the engines
    rank, world_size = run.set_up_processes()
    num_responses = args.num_prompts * args.group_size  # B
    run.check_batch(args, num_responses)
    args.check()
    problems = data.load_problems(args.task, "train", args.data_dir)
    task = data.TASKS[args.task]
    eval_problems = (
        data.load_problems(args.task, "validation", args.data_dir) if args.eval_every else []
    )
    logger = run.Run(__file__, args)
    run.check_model(args.model, args.max_model_len, args.trust_remote_code)

    import deepspeed  # seconds each
    from transformers import AutoTokenizer

    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", run.local_rank()) if on_gpu else torch.device("cpu")
    dtype = run.resolve_dtype(args.dtype)
    deepspeed.init_distributed(dist_backend="cpu:gloo,cuda:nccl" if on_gpu else "gloo")

    trusted = args.trust_remote_code
    tokenizer = AutoTokenizer.from_pretrained(args.model, trust_remote_code=trusted)
    max_prompt_len = args.max_model_len - args.max_response_len
    num_loaded = len(problems)
    problems, prompts = data.encode_prompts(problems, tokenizer, max_prompt_len)
    eval_problems, eval_prompts = data.encode_prompts(
        eval_problems[: args.eval_problems], tokenizer, max_prompt_len
    )
    shares = args.gpu_memory_utilization, args.tensor_parallel_size
    sampler = sampling.Sampler(args.model, dtype, args.max_model_len, *shares, trusted)
    model = run.load_model(args.model, dtype, trusted)
    ref_model = copy.deepcopy(model)
    adamw = {"betas": (0.9, 0.999), "weight_decay": 0.0, "torch_adam": True}
    ds_config = {
        "train_micro_batch_size_per_gpu": 1,  # micro-batches are ours, of any number and size
        "gradient_clipping": args.max_grad_norm,
        "zero_optimization": {"stage": args.zero_stage},
        "bf16": {"enabled": dtype == "bfloat16"},
        "optimizer": {"type": "AdamW", "params": adamw},
    }
    policy, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=ds_config
    )
    policy.eval()  # no dropout, not even in the update: the old log-probs have none
    if args.gradient_checkpointing:
        run.checkpoint_activations(policy.module)
    engines = {"policy": policy}

    # ==== 5.1 start, or go on from the newest checkpoint ==========================================
    start = logger.open(engines, args.num_iterations)
    sampler.wake(policy.module)
    updates_per_iteration = args.update_epochs * num_responses // args.minibatch_size
    num_updates = args.num_iterations * updates_per_iteration
    logger.say(run.describe_batch(args, len(problems), num_loaded))

    for iteration in range(start, args.num_iterations):
        metrics: dict[str, float] = {}

        # ==== 6.1 draw prompts: the same on every rank; each prompt stands G times in a row =======
        drawn = run.draw(len(problems), iteration * args.num_prompts, args.num_prompts, args.seed)
        b_problem = [index for index in drawn for _ in range(args.group_size)]
        b_prompt_ids = [prompts[index] for index in b_problem]
        b_answer = [problems[index].answer for index in b_problem]

        # ==== 6.2 sample responses: a rank for its share of the prompts; then every rank has all ==
        logger.phase("sample")
        groups = sampler.generate(
            [prompts[index] for index in run.share(drawn)],
            n=args.group_size,
            temperature=args.temperature,
            top_p=args.top_p,
            max_tokens=[args.max_response_len] * len(run.share(drawn)),
            seed=run.seed_of(args.seed, iteration, "sample", rank),
            stop=args.stop,
            logprobs=True,
        )
        samples = run.gather([sample for group in groups for sample in group])
        b_response_ids = [sample.ids for sample in samples]
        finished = [sample.finished for sample in samples]
        lengths = [len(ids) for ids in b_response_ids]
        metrics |= sampling.describe(samples)

        # ==== 6.3 rewards (B,): 1 for a right answer; a response that was cut off never has one ===
        logger.phase("grade")
        mine = [run.share(items) for items in (b_response_ids, finished, b_answer)]
        rewards = grading.grade_all(tokenizer, *mine, task.grading_rule)
        b_rewards = torch.tensor(run.gather(rewards))
        metrics["rollout/reward"] = b_rewards.mean().item()

        # ==== 6.4 old log-probs (B, T): a rank computes some of the rows, the sum has all =========
        logger.phase("logprobs")
        # from lengths, never from ids: EOS is a token to learn even where pad == eos
        response_mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).float()
        prompt_lens = torch.tensor([len(ids) for ids in b_prompt_ids])
        sequences = [p + r for p, r in zip(b_prompt_ids, b_response_ids, strict=True)]
        sequence_lens = [len(ids) for ids in sequences]
        input_ids = pad_sequence([torch.tensor(ids) for ids in sequences], batch_first=True)
        old_logprobs = torch.zeros_like(response_mask)
        sampler_logprobs = pad_sequence([torch.tensor(s.logprobs) for s in samples], True)
        gap = torch.zeros(2)  # sum of |sampler - trainer|, number of tokens
        passes = run.plan_passes(range(num_responses), sequence_lens, args.micro_batch_tokens)
        with torch.no_grad():
            for rows, weight in passes:
                inputs = run.take(rows, device, input_ids, prompt_lens, response_mask)
                old = compute_logprobs(policy, *inputs, args.temperature).cpu()
                old_logprobs[rows] += old * weight
                last = rows[-1:]  # the longest, at temperature 1: the sampler's log-probs are raw
                inputs = run.take(last, device, input_ids, prompt_lens, response_mask)
                raw = compute_logprobs(policy, *inputs, temperature=1.0).cpu()
                differences = (raw - sampler_logprobs[last]).abs() * response_mask[last]
                gap += torch.stack([differences.sum(), response_mask[last].sum()]) * weight
        for tensor in (old_logprobs, gap):
            dist.all_reduce(tensor)
        metrics["tokens/padding"] = run.count_padding(passes, sequence_lens)
        metrics["policy/sampler_gap"] = (gap[0] / gap[1]).item()
        metrics["policy/old_logprob"] = (old_logprobs.sum() / response_mask.sum()).item()

        # ==== 6.5 advantages: from the rewards of the group, the same for every token =============
        logger.phase("advantages")
        advantages = compute_advantages(b_rewards, args.group_size, response_mask)
        b_advantages = whiten(advantages, response_mask) if args.norm_adv else advantages
        groups = b_rewards.view(-1, args.group_size)
        baselines = b_rewards - advantages[:, 0]  # the mean of the others
        step_ends = [[length] for length in lengths]  # a response is one step
        step_values = [[baseline] for baseline in baselines.tolist()]
        metrics["adv/undecided"] = (groups.amax(dim=1) > groups.amin(dim=1)).float().mean().item()

        # ==== 6.6 reference log-probs (B, T); update: epochs x minibatches x micro-batches ========
        logger.phase("logprobs")
        sampler.sleep()  # or a GPU may have no room for the reference model, which is on the host
        ref_logprobs = torch.zeros_like(response_mask)
        with torch.no_grad(), run.lend(ref_model, device):
            for rows, weight in passes:
                inputs = run.take(rows, device, input_ids, prompt_lens, response_mask)
                ref = compute_logprobs(ref_model, *inputs, args.temperature).cpu()
                ref_logprobs[rows] += ref * weight
        dist.all_reduce(ref_logprobs)
        metrics["policy/ref_logprob"] = (ref_logprobs.sum() / response_mask.sum()).item()
        record = {"input_ids": input_ids, "prompt_lens": prompt_lens, "mask": response_mask}
        record |= {"old_logprobs": old_logprobs, "ref_logprobs": ref_logprobs}
        record["advantages"] = b_advantages
        logger.check(metrics, record)

        logger.phase("update")
        updates: list[dict[str, float]] = []
        for epoch in range(args.update_epochs):
            order = run.draw(num_responses, 0, num_responses, args.seed, iteration, epoch)
            for first in range(0, num_responses, args.minibatch_size):
                mb_rows = order[first : first + args.minibatch_size]
                mb_tokens = max(1, sum(lengths[row] for row in mb_rows))
                mb_sums: dict[str, torch.Tensor] = {}
                passes = run.plan_passes(mb_rows, sequence_lens, args.micro_batch_tokens)
                for i, (rows, weight) in enumerate(passes):
                    inputs = run.take(rows, device, input_ids, prompt_lens, response_mask)
                    batch = (old_logprobs, ref_logprobs, b_advantages, response_mask * weight)
                    loss, sums = compute_policy_loss(
                        compute_logprobs(policy, *inputs, args.temperature),
                        *(tensor[rows].to(device) for tensor in batch),
                        mb_tokens,
                        args.minibatch_size,
                        args.clip_coef,
                        args.kl_coef,
                    )
                    policy.set_gradient_accumulation_boundary(i == len(passes) - 1)
                    policy.backward(loss * world_size)  # DeepSpeed takes the mean over ranks
                    mb_sums = {name: mb_sums.get(name, 0) + x for name, x in sums.items()}
                totals = torch.stack(list(mb_sums.values())).cpu()
                dist.all_reduce(totals)
                means = dict(zip(mb_sums, (totals / mb_tokens).tolist(), strict=True))
                update = iteration * updates_per_iteration + len(updates)
                lr = learning_rate_at(update, num_updates, args.learning_rate, args.warmup_fraction)
                means["learning_rate"] = lr
                # a mean ratio above 10: as the official code
                bad = means["policy/ratio"] > 10 or not math.isfinite(sum(means.values()))
                means["policy/skipped"] = float(bad)
                if means["policy/skipped"]:
                    run.discard_gradients(policy)
                else:
                    means["policy/grad_norm"] = run.step(policy, lr)
                logger.check(means, record | {"minibatch": torch.tensor(mb_rows)})
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
            scores = sampling.evaluate(
                sampler,
                eval_prompts,
                [problem.answer for problem in eval_problems],
                rule=task.grading_rule,
                rounds=args.eval_rounds,
                temperature=args.eval_temperature,
                top_p=args.top_p,
                max_tokens=args.max_response_len,
                seed=run.seed_of(args.seed, iteration, "evaluate"),
                stop=args.stop,
            )
            metrics["eval/pass@1"] = sum(scores) / len(scores)
        metrics["policy/weight_distance"] = run.weight_distance(policy.module, ref_model)
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
            logger.save(done, engines, policy.module, tokenizer)
    logger.close()


# ==== 7. run ======================================================================================
if __name__ == "__main__":
    main(tyro.cli(Args))
