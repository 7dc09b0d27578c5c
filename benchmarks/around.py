"""Seconds of the Python code around the engines, at the paper's size: all must be linear.

    python -m benchmarks.around                      64 prompts x 8 responses, K = 9, one core
    python -m benchmarks.around --model FOLDER       with its tokenizer

Responses are made-up mathematics, cut to 200 to 1,000 tokens. There is a state after every step,
with K rollouts to the end of a response. `all` is one core for everything; of what is marked so,
eight ranks do an eighth each. The last column is the ratio for responses twice as long: 2 means
linear. (Lines are twice as long too, so that there are as many steps.)
"""

import random
import time

import torch
import tyro
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from common import batches, grading, ranks, sampling, steps

WORDS = ("so we have", "the sum of", "both sides", "is equal to", "and then", "it follows that")


def write_response(rng: random.Random, length: int = 1) -> str:
    """Lines with a formula; the answer is in a box. `length`: times so many words a line."""
    lines = []
    for _ in range(400):
        words = rng.choices(WORDS, k=length * rng.randrange(3, 7))
        lines.append(f"{' '.join(words).capitalize()} $x^2 + {rng.randrange(99)}x = 7$.")
    return "\n".join(lines) + "\nThe answer is $\\boxed{7}$."


def make_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=4000, special_tokens=["<eos>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")


def measure(tokenizer, length: int, num_responses: int, k: int) -> dict[str, float]:
    """Seconds of each part."""
    rng, seconds, last = random.Random(0), {}, time.perf_counter()

    def note(part: str) -> None:
        nonlocal last
        now = time.perf_counter()
        seconds[part], last = now - last, time.perf_counter()

    responses = []
    for _ in range(num_responses):
        ids = tokenizer(write_response(rng, length))["input_ids"]
        end = tokenizer("\n$\\boxed{7}$.")["input_ids"]
        responses.append([*ids[: length * rng.randrange(200, 1000) - len(end)], *end])
    last = time.perf_counter()
    ends = [steps.split_steps(ids, tokenizer, "math") for ids in responses]
    note("cut into steps (an eighth a rank)")
    states = [ids[:start] for ids, of_one in zip(responses, ends, strict=True) for start in of_one]
    rest = [ids[start:] for ids, of_one in zip(responses, ends, strict=True) for start in of_one]
    list(dict.fromkeys((0, *state) for state in states))
    note("states, equal ones once")
    rollouts = [
        sampling.Sample(state + others, [], True, False)
        for state, others in zip(states, rest, strict=True)
        for _ in range(k)
    ][: 9 * num_responses * k]
    note("rollouts behind their states")
    grading.grade_all(tokenizer, rollouts, ["7"] * len(rollouts), "boxed")
    note(f"decode and grade {len(rollouts):,} rollouts (an eighth a rank)")
    batch = batches.Batch([[1] * 85] * num_responses, responses, 4096, torch.device("cpu"))
    batch.map(lambda input_ids, lens, mask: mask)
    note("batch, and its micro-batches once")
    return seconds


def main(model: str = "", num_responses: int = 512, k: int = 9) -> None:
    ranks.set_up()
    torch.set_num_threads(1)
    rng = random.Random(1)
    texts = [write_response(rng) for _ in range(20)]
    tokenizer = AutoTokenizer.from_pretrained(model) if model else make_tokenizer(texts)
    measure(tokenizer, 1, 8, k)  # the grader's process starts
    one, two = (measure(tokenizer, x, num_responses, k) for x in (1, 2))
    print("| part | all, s | for responses twice as long |\n|---|---|---|")
    for (part, seconds), longer in zip(one.items(), two.values(), strict=True):
        print(f"| {part} | {seconds:.2f} | {longer / seconds:.1f} |")


if __name__ == "__main__":
    tyro.cli(main)
