"""Supervised fine-tuning: the checkpoint that every method starts from and stays close to.

    loss = - mean over problems of the mean over response tokens of log policy(token | prefix)

    python sft.py                                        embedded task and model, one process
    torchrun --nproc-per-node 2 sft.py                   the same on two

Shapes: B problems of a step, T tokens of the longest response (the end token EOS included), L of
the longest prompt + response. Tensors of tokens are (B, T): response only, padded on the right.
Every rank (process) holds the whole batch; common/ divides the work among the ranks.

Left out on purpose: packing, LoRA, early stopping.
"""

# ==== 1. imports ==================================================================================
import math
from dataclasses import dataclass

import torch
import torch.distributed as dist

from common import batches, data, engines, flags, ranks, run
from given import chat
from tasks import chain


# ==== 2. arguments (model, task, engine, evaluation, checkpoints: common/flags.py) ================
@dataclass
class Args(flags.Model, flags.Run):
    model: str = "embedded"
    """embedded (a small new model for --task chain), a folder, or a name on the Hugging Face hub"""
    output_dir: str = "runs/sft"
    """the run's folder; the trained model is in its hf/"""

    # optimisation
    num_epochs: float = 0.6
    """training passes over the problems (0.6 of 40,000 are 750 steps)"""
    batch_size: int = 32
    """problems per gradient step, over all ranks (processes)"""
    micro_batch_tokens: int = 8192
    """tokens of one forward pass on a rank, a micro-batch; fewer need less memory, same results"""
    learning_rate: float = 3e-3
    """the highest learning rate, at the end of a linear warm-up; then it falls to 0"""
    warmup_fraction: float = 0.1
    """share of all gradient steps in which the learning rate rises"""
    max_grad_norm: float = 1.0
    """gradients of a larger norm are scaled down to this one"""

    # evaluation and checkpoints
    eval_every: int = 150
    """steps between evaluations of the loss on validation problems; 0: never"""
    eval_problems: int = 128
    """validation problems that are evaluated, the first that fit"""
    save_every: int = 150
    """steps between checkpoints; the last step always has one"""


# ==== 3. targets ==================================================================================
def encode_solutions(
    problems: list[data.Problem], tokenizer, max_len: int, as_chat: bool = False
) -> list[tuple[list[int], list[int]]]:
    """(prompt ids, solution ids with EOS) of the problems that have at most `max_len` tokens.
    Raises UsageError when nothing is left."""
    for problem in problems:
        flags.require(problem.solution, f"no solution (--solution-field) to {problem.prompt!r:.60}")
        has_eos = tokenizer.eos_token in problem.solution
        flags.require(not has_eos, f"the solution {problem.solution!r:.60} contains the EOS token")
    prompts = data.encode(problems, tokenizer, as_chat)
    encode = chat.encode_answers if as_chat else encode_behind
    pairs = list(zip(prompts, encode(tokenizer, problems, prompts), strict=True))
    kept = [pair for pair in pairs if len(pair[0]) + len(pair[1]) <= max_len]
    what = f"all {len(pairs)} problems have more than --max-model-len {max_len} tokens: raise it"
    flags.require(kept or not pairs, what)
    data.say_dropped(len(pairs), len(kept))
    return kept


def encode_behind(tokenizer, problems: list, prompts: list[list[int]]) -> list[list[int]]:
    """Solutions are encoded after their prompts, since some tokenizers begin a text with a space.
    One whose first characters would join the prompt's last token is encoded alone."""
    texts, solutions = [problem.prompt + problem.solution for problem in problems], []
    encoded = data.to_ids(tokenizer, texts)
    for problem, text, prompt, ids in zip(problems, texts, prompts, encoded, strict=True):
        solution = ids[len(prompt) :]
        if ids[: len(prompt)] != prompt:
            solution = tokenizer(problem.solution, add_special_tokens=False)["input_ids"]
            if tokenizer.decode(prompt + solution[1:], skip_special_tokens=True) == text:
                solution = solution[1:]  # without that space
        solutions.append([*solution, tokenizer.eos_token_id])
    return solutions


# ==== 4. log-probs, schedule ======================================================================
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


def learning_rate_at(update: int, num_updates: int, peak: float, warmup_fraction: float) -> float:
    """Rises linearly to the peak, then falls linearly to 0. (The official rise is logarithmic.)"""
    warmup = max(1, math.ceil(warmup_fraction * num_updates))
    return peak * min((update + 1) / warmup, (num_updates - update) / max(1, num_updates - warmup))


# ==== 5. set-up ===================================================================================
def main(args: Args) -> None:
    # flags and files first, so that a mistake shows before the engines start
    _, world_size, device = ranks.set_up()
    flags.check(args)
    what = f"--model embedded is for --task chain only: for {args.task}, name another --model"
    flags.require(args.model != "embedded" or args.task == "chain", what)
    logger = run.Run(__file__, args)
    problems, eval_problems = data.load(args, "sft"), data.load(args, "validation")
    if args.model == "embedded":
        tokenizer = chain.make_tokenizer()
        model = chain.make_model(tokenizer, args.seed)
    else:
        tokenizer = engines.load_tokenizer(args)
    sequences = encode_solutions(problems, tokenizer, args.max_model_len, args.chat)
    eval_sequences = encode_solutions(eval_problems, tokenizer, args.max_model_len, args.chat)
    eval_sequences = eval_sequences[: args.eval_problems]
    if args.model != "embedded":
        model = engines.load_model(args, tokenizer)
    policy = engines.initialize(model, args)
    trained = {"policy": policy}
    num_steps = max(1, round(args.num_epochs * len(sequences) / args.batch_size))
    start = logger.open(trained, num_steps)
    ranks.say(
        f"{len(sequences)} problems, {num_steps} steps of {args.batch_size}, on {world_size} ranks"
    )

    def make_batch(pairs: list[tuple[list[int], list[int]]]) -> batches.Batch:
        return batches.Batch(*zip(*pairs, strict=True), args.micro_batch_tokens, device)

    def compute_loss(inputs: list[torch.Tensor], num_problems: int) -> torch.Tensor:
        logprobs = compute_logprobs(policy, *inputs, temperature=1.0)  # (b, T)
        return -(logprobs.sum(dim=1) / inputs[-1].sum(dim=1)).sum() / num_problems

    for step in range(start, num_steps):
        # ==== 6.1 draw problems ===================================================================
        logger.phase("update")
        drawn = ranks.draw(len(sequences), step * args.batch_size, args.batch_size, args.seed)
        batch = make_batch([sequences[index] for index in drawn])

        # ==== 6.6 update ==========================================================================
        total = torch.zeros(1)
        passes = batch.passes(list(range(args.batch_size)))
        for i, (rows, weight) in enumerate(passes):
            loss = compute_loss(batch.take(rows), args.batch_size) * weight
            policy.set_gradient_accumulation_boundary(i == len(passes) - 1)
            policy.backward(loss * world_size)  # DeepSpeed averages over ranks
            total += loss.detach().cpu()
        dist.all_reduce(total)
        lr = learning_rate_at(step, num_steps, args.learning_rate, args.warmup_fraction)
        metrics = {"loss/sft": total.item(), "learning_rate": lr}
        metrics["policy/grad_norm"] = engines.step(policy, lr)
        logger.check(metrics, input_ids=batch.input_ids, problems=torch.tensor(drawn))

        # ==== 6.8 log, evaluate, save =============================================================
        done = step + 1
        is_last = done == num_steps
        if args.eval_every and (done % args.eval_every == 0 or is_last):
            logger.phase("evaluate")
            total, eval_batch = torch.zeros(1), make_batch(eval_sequences)
            with torch.no_grad():
                for rows, weight in eval_batch.passes(list(range(len(eval_sequences)))):
                    total += compute_loss(eval_batch.take(rows), len(eval_sequences)).cpu() * weight
            dist.all_reduce(total)
            metrics["eval/loss"] = total.item()
        logger.log(done, metrics)
        if done % args.save_every == 0 or is_last or logger.stopping:
            logger.save(done, trained, policy.module, tokenizer)
    logger.close()


# ==== 7. run ======================================================================================
if __name__ == "__main__":
    main(flags.parse(Args))
