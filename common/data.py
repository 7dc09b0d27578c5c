"""Tasks: where problems come from, how they are graded and where their reasoning steps end.

`chain`  the embedded task: generated, seeded, needs no download (see `make_chain_problems`)
`gsm8k`  grade-school mathematics: a folder with train.jsonl and test.jsonl (--data-dir)
`jsonl`  your own: a folder with <split>.jsonl, each line an object with "prompt" and "answer" (what
         the number after "####" must be), and "solution" where sft.py is to learn from it
"""

import hashlib
import json
import os
import random
import re
from typing import NamedTuple

from common import UsageError, require
from common.grading import is_gradable


class Problem(NamedTuple):
    prompt: str
    answer: str  # what grading compares with
    solution: str | None  # a full response, the target of sft.py


class Task(NamedTuple):
    step_rule: str  # a key of steps.RULES
    splits: tuple[str, ...]
    needs_data_dir: bool


TASKS = {
    "chain": Task("line", ("sft", "train", "validation", "test"), False),
    "gsm8k": Task("gsm8k", ("sft", "train", "validation", "test"), True),
    "jsonl": Task("line", ("sft", "train", "validation", "test"), True),
}

# ---- the embedded task ---------------------------------------------------------------------------

FILLERS = ["so", "now", "then", "ok", "well", "next", "here", "thus"]
FILLERS += ["and", "we", "get", "see", "that", "gives", "just", "fine"]
CHAIN_SPLITS = {"sft": 40_000, "validation": 500, "test": 500, "train": 4_000}
CHAIN_OPERATIONS = 8


def make_chain_problems(split: str) -> list[Problem]:
    """Chains of eight additions and subtractions modulo 10, told by a sloppy demonstrator.

    A prompt is `2-3+8-2+6+2-5+9-5=?` and a newline; a solution has a line for each operation,
    between two filler words that never matter, then the answer: nine reasoning steps. Half of the
    160 facts (operation, running digit, operand) are weak: whenever one is used the demonstrator
    slips with probability 0.5, always by that fact's own offset, and goes on from the wrong digit.
    So mistakes happen in some steps and not in others: what credit assignment is for.

    The prompts of all splits are distinct, and the same on every machine: one generator, one order.
    """
    rng = random.Random(20_240_615)
    facts = [(op, digit, operand) for op in "+-" for digit in range(10) for operand in range(2, 10)]
    rng.shuffle(facts)
    slips = {fact: rng.choice((1, 2, 3)) for fact in facts[: len(facts) // 2]}

    seen: set[str] = set()
    for name, size in CHAIN_SPLITS.items():
        problems = []
        while len(problems) < size:
            start = rng.randrange(10)
            operations = [(rng.choice("+-"), rng.randrange(2, 10)) for _ in range(CHAIN_OPERATIONS)]
            prompt = str(start) + "".join(f"{op}{operand}" for op, operand in operations) + "=?\n"
            if prompt in seen:
                continue
            seen.add(prompt)
            truth, digit, lines = start, start, []
            for op, operand in operations:
                truth = apply_operation(truth, op, operand)
                result = apply_operation(digit, op, operand)
                if (op, digit, operand) in slips and rng.random() < 0.5:
                    result = (result + slips[op, digit, operand]) % 10
                lines.append(
                    f"{rng.choice(FILLERS)} {digit}{op}{operand}={result} {rng.choice(FILLERS)}\n"
                )
                digit = result
            problems.append(Problem(prompt, str(truth), "".join(lines) + f"#### {digit}"))
        if name == split:
            return problems
    raise AssertionError(split)


def apply_operation(digit: int, op: str, operand: int) -> int:
    return (digit + operand if op == "+" else digit - operand) % 10


def make_chain_tokenizer():
    """34 tokens: pad, eos, digits, `+-=?`, `####`, newline, the fillers. decode() puts spaces
    around words only, so that `so 2-3=9 then` reads like text and encode(decode(ids)) == ids."""
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


def make_chain_model_config(tokenizer):
    """A Llama of 0.34M parameters, untied."""
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


# ---- files ---------------------------------------------------------------------------------------

GSM8K_PROMPT = "[MATH_TASK] Problem:\n{question}\n\nSolution:"  # as the official configs write it
GSM8K_VALIDATION = 373


def load_problems(task: str, split: str, data_dir: str = "") -> list[Problem]:
    """The problems of one split ("sft", "train", "validation" or "test").

    Raises UsageError, naming the flag or the file and line, for anything that cannot be used.
    """
    if task not in TASKS:
        raise UsageError(f"--task {task}: no such task; there are {', '.join(TASKS)}")
    if split not in TASKS[task].splits:
        raise UsageError(
            f"--split {split}: no such split; there are {', '.join(TASKS[task].splits)}"
        )
    if TASKS[task].needs_data_dir and not data_dir:
        raise UsageError(f"--task {task} reads a folder of JSONL files: name it with --data-dir")
    if data_dir and not os.path.isdir(data_dir):
        raise UsageError(f"--data-dir {data_dir}: no such folder")
    if task == "chain":
        return make_chain_problems(split)
    if task == "gsm8k":
        return load_gsm8k(data_dir, split)
    # One file serves sft.py and the RL scripts: sft.jsonl where there is one, else train.jsonl.
    has_sft_file = os.path.exists(os.path.join(data_dir, "sft.jsonl"))
    file = "train" if split == "sft" and not has_sft_file else split
    rows = read_jsonl(os.path.join(data_dir, f"{file}.jsonl"), ("prompt", "answer"))
    for row in rows:
        check_answer(row["answer"], row["where"])
    return [Problem(row["prompt"], row["answer"], row.get("solution")) for row in rows]


def check_answer(answer: str, where: str) -> None:
    require(
        is_gradable(answer),
        f"{where}: the answer {answer!r:.60} is no number, so no response could be right",
    )


def load_gsm8k(data_dir: str, split: str) -> list[Problem]:
    """7,100 / 373 / 1,319 problems. Validation is the 373 training problems whose prompt has the
    smallest SHA-256: the same ones whatever the order of the rows. (The paper's own choice is not
    known.)"""
    path = os.path.join(data_dir, "test.jsonl" if split == "test" else "train.jsonl")
    problems = []
    for row in read_jsonl(path, ("question", "answer")):
        # "48/2 = <<48/2=24>>24": a model should not learn to write the calculator's notes.
        solution = re.sub(r"<<.*?>>", "", row["answer"], flags=re.DOTALL)
        _, marker, answer = solution.rpartition("####")
        require(marker, f"{row['where']}: the answer has no '####' before its number")
        check_answer(answer, row["where"])
        prompt = GSM8K_PROMPT.format(question=row["question"].strip())
        problems.append(Problem(prompt, answer.strip(), f"\n{solution}\n"))
    if split == "test":
        return problems
    require(
        len(problems) > GSM8K_VALIDATION,
        f"{path}: {len(problems)} problems, of which {GSM8K_VALIDATION} would be for validation",
    )
    problems.sort(
        key=lambda problem: hashlib.sha256(" ".join(problem.prompt.split()).encode()).digest()
    )
    if split == "validation":
        return problems[:GSM8K_VALIDATION]
    return problems[GSM8K_VALIDATION:]


def read_jsonl(path: str, fields: tuple[str, ...]) -> list[dict]:
    """Objects with at least these non-empty string fields, and their place "file:line" as `where`.

    A BOM, CRLF and blank lines are fine; U+2028 in a string ends no line (str.splitlines would).
    """
    hint = " (--eval-every 0 does without)" if path.endswith("validation.jsonl") else ""
    require(os.path.isfile(path), f"{path}: no such file{hint}")
    rows = []
    with open(path, encoding="utf-8-sig") as file:
        try:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                where = f"{path}:{number}"
                try:
                    row = json.loads(line)
                except (json.JSONDecodeError, RecursionError) as error:
                    raise UsageError(f"{where}: not JSON ({error})") from None
                if not isinstance(row, dict):
                    raise UsageError(
                        f"{where}: a line must hold an object, found {type(row).__name__}"
                    )
                for field in fields:
                    if not isinstance(row.get(field), str) or not row[field].strip():
                        raise UsageError(
                            f'{where}: "{field}" must be a non-empty string, '
                            f"found {row.get(field)!r:.60}"
                        )
                if not isinstance(row.get("solution", ""), str):
                    raise UsageError(f'{where}: "solution" must be a string')
                rows.append({**row, "where": where})
        except UnicodeDecodeError as error:
            raise UsageError(f"{path}: not UTF-8 ({error})") from None
    if not rows:
        raise UsageError(f"{path}: empty, expected one JSON object a line")
    return rows


# ---- prompts as ids ------------------------------------------------------------------------------


def encode_prompts(
    problems: list[Problem], tokenizer, max_prompt_len: int
) -> tuple[list[Problem], list[list[int]]]:
    """The problems whose prompt has at most `max_prompt_len` tokens, and those prompts as ids.

    The one place where a prompt becomes ids, so the one place where a BOS is added (where the
    tokenizer adds one). Raises UsageError when nothing is left.
    """
    prompt_ids = (
        tokenizer([problem.prompt for problem in problems])["input_ids"] if problems else []
    )
    kept = [i for i, ids in enumerate(prompt_ids) if len(ids) <= max_prompt_len]
    require(
        kept or not problems,
        f"all {len(problems)} prompts have more than {max_prompt_len} tokens "
        "(--max-model-len less --max-response-len): raise the first or lower the second",
    )
    return [problems[i] for i in kept], [prompt_ids[i] for i in kept]


def encode_solutions(
    problems: list[Problem], tokenizer, max_len: int
) -> list[tuple[list[int], list[int]]]:
    """(prompt ids, solution ids with EOS) of the problems that have at most `max_len` tokens.

    Prompt and solution are encoded apart, as sampling will see them. Raises UsageError when nothing
    is left.
    """
    prompt_ids = (
        tokenizer([problem.prompt for problem in problems])["input_ids"] if problems else []
    )
    solution_ids = [
        [
            *tokenizer(problem.solution, add_special_tokens=False)["input_ids"],
            tokenizer.eos_token_id,
        ]
        for problem in problems
    ]
    pairs = list(zip(prompt_ids, solution_ids, strict=True))
    kept = [pair for pair in pairs if len(pair[0]) + len(pair[1]) <= max_len]
    require(
        kept or not problems,
        f"all {len(problems)} problems have more than --max-model-len {max_len} tokens",
    )
    return kept
