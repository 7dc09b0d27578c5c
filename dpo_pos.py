"""DPO-Positive: prefer right responses to wrong ones, and never let the right ones become rarer.

    d(y) = log policy(y) - log ref(y)      ref: the SFT checkpoint; log-probs summed over tokens
    z = d(right) - d(wrong) - penalty * max(0, -d(right))
    loss = - mean over pairs of log sigmoid(beta * z)                  Pal et al.; paper, Eq. 18
           A pair is a right and a wrong response to one prompt, sampled from ref. (The paper prints
           the penalty outside of beta; its code, and Pal et al., have it inside, as here.)

    python dpo_pos.py                                    embedded task, one process, CPU or GPU
    torchrun --nproc-per-node 8 dpo_pos.py               eight ranks; docs/dpo_pos.md has more

Shapes: P prompts, G responses per prompt, B = P * G, T tokens of the longest response, L tokens of
the longest prompt + response, V vocabulary. Tensors of tokens are (B, T): response only, padded on
the right, index t = response token t. mb_ is a minibatch, of M pairs; small
letters in shapes are parts of a batch.

Left out on purpose: label smoothing, further rounds of sampling, de-duplication of responses.
"""

# ==== 1. imports ==================================================================================
import copy
import json
import math
import os
import random
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
import tyro
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint

from common import data, grading, require, run, sampling


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
    num_prompts: int = 20
    """all ranks, sampled once"""
    group_size: int = 64
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
    learning_rate: float = 7.5e-6
    """peak, after a linear warm-up; then linear to 0"""
    warmup_fraction: float = 0.03
    """of all gradient steps"""
    update_epochs: int = 3
    """passes over the pairs"""
    minibatch_size: int = 16
    """pairs per gradient step, all ranks"""
    micro_batch_tokens: int = 4096
    """tokens of one forward pass, padding included, per rank: decides memory, never results"""
    max_grad_norm: float = 1.0

    # preference loss
    beta: float = 0.1
    """weight of the log-ratios to the SFT checkpoint"""
    penalty: float = 50.0
    """weight of what a right response lost against the SFT checkpoint (lambda); 0 is plain DPO"""
    max_pairs: int = 64
    """pairs of a prompt, drawn from all right x wrong ones"""

    # evaluation and checkpoints
    eval_every: int = 40
    """gradient steps between evaluations on validation problems; 0: never"""
    eval_problems: int = 100
    eval_rounds: int = 4
    """responses per validation problem"""
    eval_temperature: float = 0.35
    save_every: int = 40
    """gradient steps between checkpoints; the last one always has one"""
    keep_checkpoints: int = 2
    """the newest ones, and the best on validation problems"""
    grace_seconds: float = 20
    """after a SIGTERM: time to finish the iteration and save it; else it is lost"""
    on_nan: Literal["stop", "skip"] = "stop"
    """NaN or infinity in a loss, gradient or log-prob: stop, or skip that minibatch and count it"""


# ==== 3. pairs ====================================================================================
def make_pairs(rewards: list[float], max_pairs: int, seed: int) -> list[tuple[int, int]]:
    """(right, wrong) indices of a prompt's responses: at most `max_pairs` of all that there are,
    drawn without repeats; none where all responses are right, or all wrong."""
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
    """Linear warm-up, then linear to 0. (The official warm-up is logarithmic.)"""
    warmup = max(1, math.ceil(warmup_fraction * num_updates))
    return peak * min((update + 1) / warmup, (num_updates - update) / max(1, num_updates - warmup))


# ==== 5. set-up ===================================================================================
def main(args: Args) -> None:
    # flags and files first: a mistake should not wait for the engines
    rank, world_size = run.set_up_processes()
    run.check_args(args)
    require(args.group_size > 1, f"--group-size {args.group_size}: a pair needs two responses")
    require(args.beta > 0, f"--beta {args.beta}: must be above 0")
    require(args.penalty >= 0, f"--penalty {args.penalty}: must be 0 (plain DPO) or more")
    run.check_at_least_1(args, "max_pairs")
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
    args.num_prompts = min(args.num_prompts, len(problems))  # none twice in an iteration
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
    start = logger.open(engines, 0)  # its gradient steps are not known yet

    # ==== 6.1 draw prompts: the same on every rank; each prompt stands G times in a row ===========
    drawn = run.draw(len(problems), 0, args.num_prompts, args.seed)
    b_problem = [index for index in drawn for _ in range(args.group_size)]
    b_prompt_ids = [prompts[index] for index in b_problem]
    b_answer = [problems[index].answer for index in b_problem]

    # ==== 6.2 sample responses, or read those that a run to be resumed has sampled ================
    path = os.path.join(logger.folder, "samples.json")
    if args.resume == "no" or not os.path.exists(path):
        logger.phase("sample")
        groups = sampler.generate(
            [prompts[index] for index in run.share(drawn)],
            n=args.group_size,
            temperature=args.temperature,
            top_p=args.top_p,
            max_tokens=[args.max_response_len] * len(run.share(drawn)),
            seed=run.seed_of(args.seed, "sample", rank),
            stop=args.stop,
            progress=rank == 0,
        )
        samples = run.gather([(s.ids, s.finished) for group in groups for s in group])
        if rank == 0:
            with open(path + ".tmp", "w") as file:
                json.dump(samples, file)
            os.replace(path + ".tmp", path)
        dist.barrier()
    with open(path) as file:
        b_response_ids, finished = zip(*json.load(file), strict=True)
    lengths = [len(ids) for ids in b_response_ids]

    # ==== 6.3 rewards and pairs (N, 2): rows of a right and of a wrong response to one prompt =====
    logger.phase("grade")
    mine = [run.share(items) for items in (b_response_ids, finished, b_answer)]
    b_rewards = run.gather(grading.grade_all(tokenizer, *mine, task.grading_rule))
    pairs: list[tuple[int, int]] = []
    for first in range(0, len(b_rewards), args.group_size):
        rewards = b_rewards[first : first + args.group_size]
        seed = run.seed_of(args.seed, first, "pairs")
        made = make_pairs(rewards, args.max_pairs, seed)
        pairs += [(first + right, first + wrong) for right, wrong in made]
    require(
        pairs, f"no prompt of {args.num_prompts} has right and wrong responses: nothing to learn"
    )

    # ==== 6.4 sequences ===========================================================================
    response_mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).float()
    prompt_lens = torch.tensor([len(ids) for ids in b_prompt_ids])
    sequences = [p + r for p, r in zip(b_prompt_ids, b_response_ids, strict=True)]
    sequence_lens = [len(ids) for ids in sequences]
    input_ids = pad_sequence([torch.tensor(ids) for ids in sequences], batch_first=True)
    pair_lens = [2 * max(sequence_lens[row] for row in pair) for pair in pairs]  # as padded

    num_updates = math.ceil(args.update_epochs * len(pairs) / args.minibatch_size)
    logger.bar.total = num_updates
    sampler.sleep()
    ref_model.to(device)  # every pass needs it
    logger.say(
        f"{args.num_prompts} prompts x {args.group_size} responses = {len(b_rewards)} episodes, "
        f"reward {sum(b_rewards) / len(b_rewards):.3f}: {len(pairs)} pairs x {args.update_epochs} "
        f"epochs = {num_updates} optimizer steps of {args.minibatch_size}, on {world_size} ranks; "
        f"{len(problems)} problems ({num_loaded - len(problems)} dropped for the length of their "
        "prompt)"
    )

    for iteration in range(start, num_updates):  # of one gradient step each
        # ==== 6.6 update ==========================================================================
        logger.phase("update")
        mb_pairs = run.draw(
            len(pairs), iteration * args.minibatch_size, args.minibatch_size, args.seed, "update"
        )
        mb_sums: dict[str, torch.Tensor] = {}
        passes = run.plan_passes(mb_pairs, pair_lens, args.micro_batch_tokens)
        for i, (mine, weight) in enumerate(passes):
            rows = [pairs[pair][side] for side in (0, 1) for pair in mine]  # right ones first
            inputs = run.take(rows, device, input_ids, prompt_lens, response_mask)
            logprobs = compute_logprobs(policy, *inputs, args.temperature)  # (2m, T)
            # in the same pass, so that rounding is the same too: they are equal at the start
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
            policy.backward(loss * world_size)  # DeepSpeed takes the mean over ranks
            sums = {name: x.detach().sum() * weight for name, x in logs.items()}
            sums["loss/dpo"] = losses.detach().sum() * weight
            mb_sums = {name: mb_sums.get(name, 0) + x for name, x in sums.items()}
        totals = torch.stack(list(mb_sums.values())).cpu()
        dist.all_reduce(totals)
        metrics = dict(zip(mb_sums, (totals / args.minibatch_size).tolist(), strict=True))
        lr = learning_rate_at(iteration, num_updates, args.learning_rate, args.warmup_fraction)
        metrics["learning_rate"] = lr
        metrics["policy/grad_norm"] = run.step(policy, lr, metrics["loss/dpo"])
        record = {"input_ids": input_ids, "prompt_lens": prompt_lens, "mask": response_mask}
        logger.check(metrics, record | {"minibatch": torch.tensor([pairs[i] for i in mb_pairs])})
        if iteration == 0:
            metrics["rollout/reward"] = sum(b_rewards) / len(b_rewards)
            metrics["tokens/sample"] = sum(lengths)

        # ==== 6.8 log, evaluate, save =============================================================
        done = iteration + 1
        is_last = done == num_updates
        if args.eval_every and (done % args.eval_every == 0 or is_last):
            logger.phase("evaluate")
            sampler.wake(policy.module)
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
            sampler.sleep()
            metrics["policy/weight_distance"] = run.weight_distance(policy.module, ref_model)
        logger.log(done, metrics)
        if done % args.save_every == 0 or is_last or logger.stopping:
            logger.save(done, engines, policy.module, tokenizer)
    logger.close()


# ==== 7. run ======================================================================================
if __name__ == "__main__":
    main(tyro.cli(Args))
