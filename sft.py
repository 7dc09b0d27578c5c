"""Supervised fine-tuning: the checkpoint that every method starts from and stays close to.

    loss = - mean over problems of the mean over response tokens of log policy(token | prefix)

    python sft.py                                        embedded task and model, one process
    torchrun --nproc-per-node 2 sft.py                   the same on two

Shapes: B problems of a step, T tokens of the longest response (EOS included), L tokens of the
longest prompt + response. Tensors of tokens are (B, T): response only, padded on the right.

Left out on purpose: packing, chat templates, LoRA, early stopping.
"""

# ==== 1. imports ==================================================================================
import math
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
import tyro
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint

from common import data, require, run


# ==== 2. arguments ================================================================================
@dataclass
class Args:
    # experiment
    seed: int = 1
    """decides the initial weights of the embedded model and the order of the data"""
    output_dir: str = "runs/sft"
    """the run's folder; the checkpoint is its hf/"""
    resume: Literal["no", "auto"] = "no"
    """auto: go on from the newest checkpoint in the run's folder"""
    track: bool = False
    """log to Weights & Biases too (pip install wandb); TensorBoard files are always written"""

    # model and data
    model: str = "embedded"
    """embedded (a new model for the task chain), a checkpoint folder, or a name on the hub"""
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
    gradient_checkpointing: bool = False
    """the backward pass computes activations again: less memory, more time"""
    max_model_len: int = 128
    """tokens of prompt + response; longer problems are dropped and counted"""

    # optimisation
    num_epochs: float = 0.72
    """passes over the problems (0.72 of 40,000 are 450 steps)"""
    batch_size: int = 64
    """problems per gradient step, all ranks"""
    micro_batch_tokens: int = 8192
    """tokens of one forward pass, padding included, per rank: decides memory, never results"""
    learning_rate: float = 3e-3
    """peak, after a linear warm-up; then linear to 0"""
    warmup_fraction: float = 0.1
    """of all gradient steps"""
    max_grad_norm: float = 1.0

    # evaluation and checkpoints
    eval_every: int = 150
    """steps between evaluations of the loss on validation problems; 0: never"""
    eval_problems: int = 128
    save_every: int = 150
    """steps between checkpoints; the last step always has one"""
    keep_checkpoints: int = 2
    """the newest ones, and the best on validation problems"""
    grace_seconds: float = 20
    """after a SIGTERM: time to finish the iteration and save it; else it is lost"""
    on_nan: Literal["stop", "skip"] = "stop"
    """NaN or infinity in a loss, gradient or log-prob: stop, or skip that minibatch and count it"""


# ==== 4. log-probs, schedule ======================================================================
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


def learning_rate_at(update: int, num_updates: int, peak: float, warmup_fraction: float) -> float:
    """Linear warm-up, then linear to 0. (The official warm-up is logarithmic.)"""
    warmup = max(1, math.ceil(warmup_fraction * num_updates))
    return peak * min((update + 1) / warmup, (num_updates - update) / max(1, num_updates - warmup))


# ==== 5. set-up ===================================================================================
def main(args: Args) -> None:
    _, world_size = run.set_up_processes()
    run.check_args(args)
    require(args.num_epochs > 0, f"--num-epochs {args.num_epochs}: must be above 0")
    is_embedded = args.model == "embedded"
    require(
        not is_embedded or args.task == "chain",
        f"--model embedded knows the characters of --task chain only, not those of {args.task}",
    )
    problems = data.load_problems(args.task, "sft", args.data_dir)
    eval_problems = (
        data.load_problems(args.task, "validation", args.data_dir) if args.eval_every else []
    )
    for problem in problems + eval_problems:
        require(problem.solution, f'--task {args.task}: no "solution" for {problem.prompt!r:.60}')
    logger = run.Run(__file__, args)
    if not is_embedded:
        run.check_model(args.model, args.max_model_len, args.trust_remote_code)

    import deepspeed  # seconds each
    from transformers import AutoTokenizer

    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", run.local_rank()) if on_gpu else torch.device("cpu")
    dtype = run.resolve_dtype(args.dtype)
    deepspeed.init_distributed(dist_backend="cpu:gloo,cuda:nccl" if on_gpu else "gloo")

    if is_embedded:
        from transformers import AutoModelForCausalLM

        tokenizer = data.make_chain_tokenizer()
        torch.manual_seed(args.seed)
        model = AutoModelForCausalLM.from_config(data.make_chain_model_config(tokenizer))
    else:
        trusted = args.trust_remote_code
        tokenizer = AutoTokenizer.from_pretrained(args.model, trust_remote_code=trusted)
        model = run.load_model(args.model, dtype, trusted)
    sequences, eval_sequences = (
        data.encode_solutions(some, tokenizer, args.max_model_len)
        for some in (problems, eval_problems[: args.eval_problems])
    )
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
    policy.eval()  # no dropout
    if args.gradient_checkpointing:
        run.checkpoint_activations(policy.module)
    engines = {"policy": policy}
    num_steps = max(1, round(args.num_epochs * len(sequences) / args.batch_size))
    start = logger.open(engines, num_steps)
    logger.say(
        f"{len(sequences)} problems ({len(problems) - len(sequences)} dropped: prompt + response "
        f"above {args.max_model_len} tokens), {num_steps} steps of {args.batch_size}, "
        f"on {world_size} rank(s)"
    )

    def passes(batch: list[tuple[list[int], list[int]]]):
        """This rank's micro-batches: weight, (input_ids (b, L), prompt_lens (b,), mask (b, T))."""
        lengths = [len(prompt) + len(response) for prompt, response in batch]
        input_ids = pad_sequence([torch.tensor(p + r) for p, r in batch], batch_first=True)
        prompt_lens = torch.tensor([len(prompt) for prompt, _ in batch])
        response_lens = torch.tensor([len(response) for _, response in batch])
        mask = (torch.arange(int(response_lens.max())) < response_lens[:, None]).float()
        plan = run.plan_passes(range(len(batch)), lengths, args.micro_batch_tokens)
        return [(w, run.take(rows, device, input_ids, prompt_lens, mask)) for rows, w in plan]

    def loss_of(inputs: list[torch.Tensor], num_problems: int) -> torch.Tensor:
        logprobs = compute_logprobs(policy, *inputs, temperature=1.0)  # (b, T)
        return -(logprobs.sum(dim=1) / inputs[-1].sum(dim=1)).sum() / num_problems

    for step in range(start, num_steps):
        # ==== 6.1 draw problems ===================================================================
        logger.phase("update")
        drawn = run.draw(len(sequences), step * args.batch_size, args.batch_size, args.seed)
        batch = [sequences[index] for index in drawn]

        # ==== 6.6 update ==========================================================================
        total = torch.zeros(1)
        batch_passes = passes(batch)
        for i, (weight, inputs) in enumerate(batch_passes):
            loss = loss_of(inputs, args.batch_size) * weight
            policy.set_gradient_accumulation_boundary(i == len(batch_passes) - 1)
            policy.backward(loss * world_size)  # DeepSpeed takes the mean over ranks
            total += loss.detach().cpu()
        dist.all_reduce(total)
        rate = learning_rate_at(step, num_steps, args.learning_rate, args.warmup_fraction)
        metrics = {"loss/sft": total.item(), "learning_rate": rate}
        metrics["policy/grad_norm"] = run.step(policy, rate, total.item())
        logger.check(metrics, {"problems": torch.tensor(drawn)})

        # ==== 6.8 log, evaluate, save =============================================================
        done = step + 1
        is_last = done == num_steps
        if args.eval_every and (done % args.eval_every == 0 or is_last):
            logger.phase("evaluate")
            total = torch.zeros(1)
            with torch.no_grad():
                for weight, inputs in passes(eval_sequences):
                    total += loss_of(inputs, len(eval_sequences)).cpu() * weight
            dist.all_reduce(total)
            metrics["eval/loss"] = total.item()
        logger.log(done, metrics)
        if done % args.save_every == 0 or is_last or logger.stopping:
            logger.save(done, engines, policy.module, tokenizer)
    logger.close()


# ==== 7. run ======================================================================================
if __name__ == "__main__":
    main(tyro.cli(Args))
