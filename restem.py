"""RestEM: fine-tune on the sampled responses that are right, from the start again each time.

    data = responses of the newest policy with reward 1                      Singh et al.; App. C.5
    loss = - mean over data of the mean over tokens of log policy(token)     Eq. 19, tokens averaged
           policy: the SFT checkpoint again in each iteration
    newest policy = the last of its checkpoints, step 0 included, up to which accuracy on validation
           problems has risen strictly

    python restem.py                                     embedded task, one process, CPU or GPU
    torchrun --nproc-per-node 8 restem.py                eight ranks; docs/restem.md has more

Shapes: P prompts, G responses per prompt, B = P * G, T tokens of the longest response, L tokens of
the longest prompt + response, V vocabulary. Tensors of tokens are (B, T): response only, padded on
the right, index t = response token t. b_ is the whole batch, mb_ a minibatch; small letters in
shapes are parts of a batch.

Left out on purpose: advantages, KL, de-duplication of responses, a limit per prompt.
"""

# ==== 1. imports ==================================================================================
import copy
import gc
import math
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
    num_prompts: int = 40
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
    num_iterations: int = 4
    """each samples, then fine-tunes the SFT checkpoint; the learning rate falls to 0 in each"""
    learning_rate: float = 6e-5
    """peak, after a linear warm-up"""
    warmup_fraction: float = 0.03
    """of an iteration's gradient steps"""
    update_epochs: int = 8
    """passes over an iteration's right responses"""
    minibatch_size: int = 16
    """responses per gradient step, all ranks"""
    micro_batch_tokens: int = 4096
    """tokens of one forward pass, padding included, per rank: decides memory, never results"""
    max_grad_norm: float = 1.0

    # evaluation and checkpoints
    eval_every: int = 10
    """gradient steps between the checkpoints of the walk"""
    eval_problems: int = 100
    eval_rounds: int = 4
    """responses per validation problem"""
    eval_temperature: float = 0.35
    keep_checkpoints: int = 2
    """the newest ones, and the best on validation problems; every iteration has one"""
    grace_seconds: float = 20
    """after a SIGTERM: time to finish the iteration and save it; else it is lost"""
    on_nan: Literal["stop", "skip"] = "stop"
    """NaN or infinity in a loss, gradient or log-prob: stop, or skip that minibatch and count it"""


# ==== 3. selection ================================================================================
def select_checkpoint(accuracies: list[float]) -> int:
    """The walk: index of the last of the first accuracies that rise strictly, one after another."""
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


def compute_sft_loss(
    logprobs: torch.Tensor, response_mask: torch.Tensor, num_responses: int
) -> torch.Tensor:
    """A micro-batch's part of its minibatch's loss: (b, T) -> (). A response weighs the same, long
    or short; `num_responses` counts the whole minibatch, all ranks and micro-batches."""
    return -(logprobs.sum(dim=1) / response_mask.sum(dim=1)).sum() / num_responses


def learning_rate_at(update: int, num_updates: int, peak: float, warmup_fraction: float) -> float:
    """Linear warm-up, then linear to 0. (The official warm-up is logarithmic.)"""
    warmup = max(1, math.ceil(warmup_fraction * num_updates))
    return peak * min((update + 1) / warmup, (num_updates - update) / max(1, num_updates - warmup))


# ==== 5. set-up ===================================================================================
def main(args: Args) -> None:
    # flags and files first: a mistake should not wait for the engines
    rank, world_size = run.set_up_processes()
    run.check_args(args)
    require(args.eval_every > 0, "--eval-every 0: the walk needs checkpoints to evaluate")
    require(args.zero_stage < 3, "--zero-stage 3: the walk goes back to whole weights; take 0 or 2")
    problems = data.load_problems(args.task, "train", args.data_dir)
    task = data.TASKS[args.task]
    eval_problems = data.load_problems(args.task, "validation", args.data_dir)
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
    num_responses = args.num_prompts * args.group_size  # B
    adamw = {"betas": (0.9, 0.999), "weight_decay": 0.0, "torch_adam": True}
    ds_config = {
        "train_micro_batch_size_per_gpu": 1,  # micro-batches are ours, of any number and size
        "gradient_clipping": args.max_grad_norm,
        "zero_optimization": {"stage": args.zero_stage},
        "bf16": {"enabled": dtype == "bfloat16"},
        "optimizer": {"type": "AdamW", "params": adamw},
    }

    # ==== 5.1 start, or go on from the newest checkpoint ==========================================
    start = logger.open({}, args.num_iterations)  # an iteration needs the last one's weights only
    if start:
        model = run.load_model(f"{logger.path(start)}/hf", dtype, trusted)
    sampler.wake(model.to(device))
    logger.say(
        f"{args.num_prompts} prompts x {args.group_size} responses = {num_responses} episodes an "
        f"iteration, on {world_size} ranks; {len(problems)} problems "
        f"({num_loaded - len(problems)} dropped for the length of their prompt)"
    )

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

        # ==== 6.4 keep the right ones: N of B =====================================================
        kept = (b_rewards == 1).nonzero().flatten().tolist()  # (N,) rows
        # from lengths, never from ids: EOS is a token to learn even where pad == eos
        response_mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).float()
        prompt_lens = torch.tensor([len(ids) for ids in b_prompt_ids])
        sequences = [p + r for p, r in zip(b_prompt_ids, b_response_ids, strict=True)]
        sequence_lens = [len(ids) for ids in sequences]
        input_ids = pad_sequence([torch.tensor(ids) for ids in sequences], batch_first=True)
        sampler_logprobs = pad_sequence([torch.tensor(s.logprobs) for s in samples], True)
        passes = run.plan_passes(range(num_responses), sequence_lens, args.micro_batch_tokens)
        gap = torch.zeros(2)  # sum of |sampler - trainer|, number of tokens
        with torch.no_grad():
            for rows, weight in passes:
                last = rows[-1:]  # the longest, at temperature 1: the sampler's log-probs are raw
                inputs = run.take(last, device, input_ids, prompt_lens, response_mask)
                raw = compute_logprobs(model, *inputs, temperature=1.0).cpu()
                differences = (raw - sampler_logprobs[last]).abs() * response_mask[last]
                gap += torch.stack([differences.sum(), response_mask[last].sum()]) * weight
        dist.all_reduce(gap)
        metrics["policy/sampler_gap"] = (gap[0] / gap[1]).item()
        record = {"input_ids": input_ids, "prompt_lens": prompt_lens, "mask": response_mask}
        logger.check(metrics, record)
        mb_size = min(args.minibatch_size, len(kept))
        num_updates = math.ceil(args.update_epochs * len(kept) / max(1, mb_size))

        # ==== 6.5 start again: the SFT checkpoint, a new optimizer ================================
        logger.phase("restart")
        sampler.sleep()
        policy = model = None
        gc.collect()  # the last engine goes before the next one comes
        model = run.load_model(args.model, dtype, trusted)
        policy, *_ = deepspeed.initialize(
            model=model, model_parameters=model.parameters(), config=ds_config
        )
        policy.eval()  # no dropout
        if args.gradient_checkpointing:
            run.checkpoint_activations(policy.module)

        # ==== 6.6 update: minibatches x micro-batches, and the walk along the checkpoints =========
        updates: list[dict[str, float]] = []
        accuracies: list[float] = []
        for update in range(num_updates + 1):
            if update % args.eval_every == 0 or update == num_updates:
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
                accuracies.append(metrics["eval/pass@1"])
                logger.say(f"walk: step {update} of {num_updates}: {accuracies[-1]:.3f}")
                if select_checkpoint(accuracies) < len(accuracies) - 1:
                    break
                chosen = {name: x.cpu().clone() for name, x in policy.module.state_dict().items()}
                metrics["walk/chosen_update"] = update
            if update == num_updates:
                break
            logger.phase("update")
            drawn = run.draw(len(kept), update * mb_size, mb_size, args.seed, iteration, "update")
            mb_rows = [kept[index] for index in drawn]
            total = torch.zeros(1)
            passes = run.plan_passes(mb_rows, sequence_lens, args.micro_batch_tokens)
            for i, (rows, weight) in enumerate(passes):
                inputs = run.take(rows, device, input_ids, prompt_lens, response_mask)
                logprobs = compute_logprobs(policy, *inputs, args.temperature)
                loss = compute_sft_loss(logprobs, inputs[-1], mb_size) * weight
                policy.set_gradient_accumulation_boundary(i == len(passes) - 1)
                policy.backward(loss * world_size)  # DeepSpeed takes the mean over ranks
                total += loss.detach().cpu()
            dist.all_reduce(total)
            lr = learning_rate_at(update, num_updates, args.learning_rate, args.warmup_fraction)
            updates.append({"loss/sft": total.item(), "learning_rate": lr})
            updates[-1]["policy/grad_norm"] = run.step(policy, lr, total.item())
            logger.check(updates[-1], record | {"minibatch": torch.tensor(mb_rows)})

        # ==== 6.7 weights to the sampler: of the chosen checkpoint ================================
        logger.phase("sync")
        policy.module.load_state_dict(chosen)
        sampler.wake(policy.module)

        # ==== 6.8 log, evaluate, save =============================================================
        done = iteration + 1
        metrics |= run.mean_of(updates)
        metrics["eval/pass@1"] = max(accuracies)  # of the chosen one: they rose up to it
        metrics["walk/kept"] = len(kept)
        metrics["walk/updates"] = len(updates)
        metrics["walk/evaluations"] = len(accuracies)
        metrics["policy/weight_distance"] = run.weight_distance(policy.module, ref_model)
        logger.log(done, metrics)
        logger.save(done, {}, policy.module, tokenizer)
        policy.destroy()
    logger.close()


# ==== 7. run ======================================================================================
if __name__ == "__main__":
    main(tyro.cli(Args))
