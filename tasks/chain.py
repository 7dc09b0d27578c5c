"""The embedded task: problems, a tokenizer and a model that need no download."""

import functools
import random

import torch

FILLERS = ["so", "now", "then", "ok", "well", "next", "here", "thus"]
FILLERS += ["and", "we", "get", "see", "that", "gives", "just", "fine"]
SPLITS = {"sft": 40_000, "validation": 500, "test": 500, "train": 4_000}
LOST = "?"


@functools.cache
def make_splits(
    operations: int = 8, weak: float = 0.5, slip: float = 0.5, words: int = 1, lost: bool = False
) -> dict[str, list[tuple[str, str, str]]]:
    """{split: (prompt, answer, solution)s}: chains of eight additions and subtractions modulo
    10, solved by a demonstrator who makes mistakes. (The embedded task has the defaults.)

    A prompt is `2-3+8-2+6+2-5+9-5=?` and a newline; a solution has a line for each operation,
    between two filler words that never matter, then the answer: nine reasoning steps. Half of the
    160 facts (operation, running digit, operand) are unreliable: each use is wrong with probability
    0.5, always by that fact's own offset, and the solution continues from the wrong digit. So some
    steps make mistakes and others do not, and credit assignment has to tell which.

    `lost`: a wrong result is `?`, and so are all after it. `words`: fillers on each side.
    No prompt is in two splits, and all are the same on every machine: one generator, one order.
    """
    rng = random.Random(20_240_615)
    facts = [(op, digit, operand) for op in "+-" for digit in range(10) for operand in range(2, 10)]
    rng.shuffle(facts)
    slips = {fact: rng.choice((1, 2, 3)) for fact in facts[: round(weak * len(facts))]}

    splits: dict[str, list[tuple[str, str, str]]] = {}
    seen: set[str] = set()
    for name, size in SPLITS.items():
        problems = splits[name] = []
        while len(problems) < size:
            start = rng.randrange(10)
            chain = [(rng.choice("+-"), rng.randrange(2, 10)) for _ in range(operations)]
            prompt = str(start) + "".join(f"{op}{operand}" for op, operand in chain) + "=?\n"
            if prompt in seen:
                continue
            seen.add(prompt)
            truth, digit, lines = start, start, []
            for op, operand in chain:
                truth = apply_operation(truth, op, operand)
                result = LOST if digit == LOST else apply_operation(digit, op, operand)
                if (op, digit, operand) in slips and rng.random() < slip:
                    result = LOST if lost else (result + slips[op, digit, operand]) % 10
                before, after = ([rng.choice(FILLERS) for _ in range(words)] for _ in range(2))
                line = [*before, f"{digit}{op}{operand}={result}", *after]
                lines.append(" ".join(line) + "\n")
                digit = result
            problems.append((prompt, str(truth), "".join(lines) + f"#### {digit}"))
    return splits


def apply_operation(digit: int, op: str, operand: int) -> int:
    return (digit + operand if op == "+" else digit - operand) % 10


def make_tokenizer():
    """34 tokens: pad, eos, digits, `+-=?`, `####`, newline, the fillers. decode() puts spaces
    around words only: `so 2-3=9 then` reads like text, and encode(decode(ids)) == ids."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = ["<pad>", "<eos>", *"0123456789+-=?", "####", "\n", *FILLERS]
    tokenizer = Tokenizer(
        models.WordLevel({token: i for i, token in enumerate(vocab)}, unk_token="<pad>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(" +"), "removed"),
            pre_tokenizers.Split(Regex("[a-z]+|####|\n|[^a-z]"), "isolated"),
        ]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            *(decoders.Replace(Regex(f"^{word}$"), f" {word} ") for word in [*FILLERS, "####"]),
            decoders.Fuse(),
            decoders.Replace(Regex(" *\n *"), "\n"),
            decoders.Replace(Regex("  +"), " "),
            decoders.Replace(Regex("^ +| +$"), ""),
        ]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        clean_up_tokenization_spaces=False,
        model_max_length=128,
    )


def make_model_config(tokenizer):
    """A Llama of 0.34M parameters, whose head is not tied to its embeddings."""
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=3,
        max_position_embeddings=tokenizer.model_max_length,
        initializer_range=0.05,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def make_model(tokenizer, seed: int):
    """A model of that configuration with random weights."""
    from transformers import LlamaForCausalLM

    torch.manual_seed(seed)
    return LlamaForCausalLM(make_model_config(tokenizer))
