"""Tasks: where problems come from, how they are graded and where their reasoning steps end.

`chain`  the embedded task: generated, seeded, needs no download (see `make_chain_problems`)
`gsm8k`  grade-school mathematics: from the hub, or a folder with train.jsonl and test.jsonl whose
         lines have "question" and "answer" (the solution, with the number behind "####")
`math`   competition mathematics, tested on MATH-500: from the hub, or such a folder whose lines
         have "problem" and "solution" (the answer in its last box), "answer" where it is known
`jsonl`  your own: a folder with <split>.jsonl, each line an object with "prompt" and "answer" (what
         the number after "####" must be), and "solution" where sft.py is to learn from it
"""

import functools
import hashlib
import json
import os
import random
import re
from typing import NamedTuple

from common import UsageError, require
from common.grading import RULES, extract_boxed


class Problem(NamedTuple):
    prompt: str
    answer: str  # what grading compares with
    solution: str | None  # a full response, the target of sft.py


class Task(NamedTuple):
    step_rule: str  # a key of steps.RULES
    grading_rule: str  # a key of grading.RULES


TASKS = {
    "chain": Task("line", "####"),
    "gsm8k": Task("gsm8k", "####"),
    "math": Task("math", "boxed"),
    "jsonl": Task("line", "####"),
}
SPLITS = ("sft", "train", "validation", "test")  # sft.py learns from "sft", the others from "train"

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


# ---- GSM8K, MATH and files -----------------------------------------------------------------------

PROMPT = "[MATH_TASK] Problem:\n{problem}\n\nSolution:"  # as the official configs write it
SUBJECTS = ("algebra", "counting_and_probability", "geometry", "intermediate_algebra")
SUBJECTS += ("number_theory", "prealgebra", "precalculus")
HUB = {  # the (dataset, config, split)s that make up a file
    "gsm8k": {
        "train": [("openai/gsm8k", "main", "train")],
        "test": [("openai/gsm8k", "main", "test")],
    },
    "math": {
        "train": [
            ("EleutherAI/hendrycks_math", subject, split)
            for subject in SUBJECTS
            for split in ("train", "test")
        ],
        "test": [("HuggingFaceH4/MATH-500", "default", "test")],
    },
}
FIELDS = {"gsm8k": ("question", "answer"), "math": ("problem", "solution")}


def load_problems(task: str, split: str, data_dir: str = "") -> list[Problem]:
    """The problems of one split ("sft", "train", "validation" or "test").

    Raises UsageError, naming the flag or the file and line, for anything that cannot be used.
    """
    require(task in TASKS, f"--task {task}: no such task; there are {', '.join(TASKS)}")
    require(split in SPLITS, f"--split {split}: no such split; there are {', '.join(SPLITS)}")
    require(not data_dir or os.path.isdir(data_dir), f"--data-dir {data_dir}: no such folder")
    if task == "chain":
        return make_chain_problems(split)
    if task in HUB:
        file = "test" if split == "test" else "train"
        splits, missing = load_mathematics(task, file, data_dir)
        where = data_dir or "the hub"
        require(
            split != "validation" or not missing,
            f"{where}: {missing} of the validation problems of {task} are not in its training set "
            "(--eval-every 0 does without)",
        )
        problems = splits["train" if split == "sft" else split]
        require(problems, f"{where}: no usable problem for {split}")
        return problems
    require(data_dir, f"--task {task} reads a folder of JSONL files: name it with --data-dir")
    # One file serves sft.py and the RL scripts: sft.jsonl where there is one, else train.jsonl.
    has_sft_file = os.path.exists(os.path.join(data_dir, "sft.jsonl"))
    file = "train" if split == "sft" and not has_sft_file else split
    rows = read_jsonl(os.path.join(data_dir, f"{file}.jsonl"), ("prompt", "answer"))
    for row in rows:
        check_answer(task, row["answer"], row["where"])
    check_disjoint(rows, file, data_dir)
    return [Problem(row["prompt"], row["answer"], row.get("solution")) for row in rows]


def check_answer(task: str, answer: str, where: str) -> None:
    require(
        RULES[TASKS[task].grading_rule].is_gradable(answer),
        f"{where}: the answer {answer!r:.60} is no number, so no response could be right",
    )


def check_disjoint(rows: list[dict], file: str, data_dir: str) -> None:
    """Raises UsageError where one of these problems stands in another file of the folder too,
    perhaps with other line ends or more spaces: what is trained on must not be evaluated on."""
    places = {tuple(row["prompt"].split()): row["where"] for row in rows}
    for other in sorted({*SPLITS} - ({"sft", "train"} if file in ("sft", "train") else {file})):
        path = os.path.join(data_dir, f"{other}.jsonl")
        for row in read_jsonl(path, ("prompt",)) if os.path.exists(path) else ():
            place = places.get(tuple(row["prompt"].split()))
            require(
                place is None,
                f"{place}: the problem {row['prompt']!r:.60} is that of {row['where']} too: take "
                "it out of one of them, or scores would be of problems that were trained on",
            )


@functools.cache  # one file holds two splits
def load_mathematics(task: str, file: str, data_dir: str) -> tuple[dict[str, list[Problem]], int]:
    """{split: problems} of "train" or "test", and how many validation problems are not there.

    GSM8K: 7,100 / 373 / 1,319 problems; MATH: 11,498 / 500 / 500 (11,500 less two whose box is
    empty), in the order of their fingerprints, which is the same wherever the rows come from.

    Which problems are for validation, which for the test, and which of the 12,500 of MATH are
    MATH-500, stands in splits.json as fingerprints. (The paper's choice for validation is not
    known; ours are the smallest fingerprints.)
    """
    path = os.path.join(data_dir, f"{file}.jsonl")
    rows = read_jsonl(path, FIELDS[task]) if data_dir else read_hub(task, file)
    where = path if data_dir else f"{task} from the hub"
    parse = {"gsm8k": parse_gsm8k, "math": parse_math}[task]
    problems = sorted(
        (fingerprint(row[FIELDS[task][0]]), *parse(row), row["where"]) for row in rows
    )
    with open(os.path.join(os.path.dirname(__file__), "splits.json")) as stream:
        known = json.load(stream)[task]
    split_of = {key: name for name, keys in known.items() for key in keys}
    keys = {key for key, *_ in problems}
    missing = {name: len(set(known[name]) - keys) for name in known}
    if file == "test":
        strangers = len(keys - set(known["test"]))
        require(
            not missing["test"] and not strangers,
            f"{where}: not the test set of {task}: {missing['test']} of its {len(known['test'])} "
            f"problems are missing, {strangers} others are there (--task jsonl is for your own)",
        )
    else:  # the test problems are in it, to be taken out, or they are not; nothing between
        require(
            missing["test"] in (0, len(known["test"])),
            f"{where}: only {len(known['test']) - missing['test']} of the {len(known['test'])} "
            "test problems are recognized in it: the others may stand there in another wording, "
            "and would be trained on",
        )
    splits: dict[str, list] = {"train": [], "validation": [], "test": []}
    unusable = []
    for key, prompt, answer, solution, place in problems:
        if answer:
            splits[split_of.get(key, "train")].append(Problem(prompt, answer, solution))
        else:
            unusable.append(place)
    if os.environ.get("RANK", "0") == "0":
        counts = [f"{len(found)} {name}" for name, found in splits.items() if found]
        if unusable:
            counts.append(f"{len(unusable)} without an answer ({', '.join(unusable[:3])})")
        print(f"{where}, {len(rows)} rows: {', '.join(counts)}")
    return splits, missing["validation"]


def fingerprint(text: str) -> str:
    """16 hexadecimal digits that spaces, line ends and their number do not change."""
    return hashlib.sha256("".join(text.split()).encode()).hexdigest()[:16]


def parse_gsm8k(row: dict) -> Problem:
    # "48/2 = <<48/2=24>>24": a model should not learn to write the calculator's notes.
    solution = re.sub(r"<<.*?>>", "", row["answer"], flags=re.DOTALL)
    _, marker, answer = solution.rpartition("####")
    require(marker, f"{row['where']}: the answer has no '####' before its number")
    check_answer("gsm8k", answer, row["where"])
    return Problem(
        PROMPT.format(problem=row["question"].strip()), answer.strip(), f"\n{solution}\n"
    )


def parse_math(row: dict) -> Problem:
    """The last box that is not empty has the answer; without one it is "", and the row unusable."""
    answer = row.get("answer") or extract_boxed(row["solution"]) or ""
    return Problem(PROMPT.format(problem=row["problem"].strip()), answer, f"\n{row['solution']}\n")


def read_hub(task: str, file: str) -> list[dict]:
    """Rows as `read_jsonl` gives them; on the first call `datasets` downloads them to its cache."""
    from datasets import load_dataset  # seconds

    rows = []
    for source in HUB[task][file]:
        name, config, split = source
        try:
            loaded = load_dataset(name, config, split=split)
        except Exception as error:  # of any kind: of the network, of the hub, of the files
            raise UsageError(
                f"--task {task}: {name} could not be loaded from the hub "
                f"({' '.join(str(error).split())[:200]}): run this once where there is a network, "
                "or name a folder with train.jsonl and test.jsonl with --data-dir"
            ) from None
        for number, row in enumerate(loaded, 1):
            rows.append(check_row(row, FIELDS[task], f"{'/'.join(source)}:{number}"))
    return rows


def read_jsonl(path: str, fields: tuple[str, ...]) -> list[dict]:
    """Objects with at least these non-empty string fields, and their place "file:line" as `where`.

    A BOM, CRLF and blank lines are fine; U+2028 in a string ends no line (str.splitlines would).
    """
    hint = " (--eval-every 0 does without)" if path.endswith("validation.jsonl") else ""
    require(os.path.isfile(path), f"{path}: no such file{hint}")
    rows: list[dict] = []
    places: dict[str, str] = {}  # id -> where
    with open(path, encoding="utf-8-sig") as file:
        try:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                where = f"{path}:{number}"
                try:
                    row = json.loads(line)
                except (ValueError, RecursionError) as error:
                    raise UsageError(f"{where}: not JSON ({error})") from None
                rows.append(check_row(row, fields, where))
                name = row.get("unique_id", row.get("id"))
                if name is not None:
                    first = places.setdefault(str(name), where)
                    require(first == where, f"{where}: the id {name!r:.60} is that of {first} too")
        except UnicodeDecodeError as error:
            raise UsageError(f"{path}: not UTF-8 ({error})") from None
    require(rows, f"{path}: empty, expected one JSON object a line")
    return rows


def check_row(row: object, fields: tuple[str, ...], where: str) -> dict:
    """The row with `where`, if its fields are what they must be."""
    require(
        isinstance(row, dict), f"{where}: a line must hold an object, found {type(row).__name__}"
    )
    # what is there though it need not be: an answer of MATH, a solution of your own problems
    for field in (*fields, *({"answer", "solution"} & row.keys() - {*fields})):
        require(
            isinstance(row.get(field), str) and row[field].strip(),
            f'{where}: "{field}" must be a non-empty string, found {row.get(field)!r:.60}',
        )
        require(
            not re.search("[\ud800-\udfff]", row[field]),
            f'{where}: "{field}" has half of a character (a lone surrogate)',
        )
    return {**row, "where": where}


# ---- prompts as ids ------------------------------------------------------------------------------


def encode(problems: list[Problem], tokenizer) -> list[list[int]]:
    """The one place where a prompt becomes ids, so the one place where a BOS is added (where the
    tokenizer adds one). Raises UsageError for a prompt that has one already."""
    texts = [problem.prompt for problem in problems]
    prompt_ids = tokenizer(texts, verbose=False)["input_ids"] if problems else []
    for text, ids in zip(texts, prompt_ids, strict=True):
        require(
            ids[:2].count(tokenizer.bos_token_id) < 2,
            f"the prompt {text!r:.60} begins with {tokenizer.bos_token!r}, and the tokenizer puts "
            "one before it: take it out of the data",
        )
    return prompt_ids


def encode_prompts(
    problems: list[Problem], tokenizer, max_prompt_len: int
) -> tuple[list[Problem], list[list[int]]]:
    """The problems whose prompt has at most `max_prompt_len` tokens, and those prompts as ids.

    Raises UsageError when nothing is left.
    """
    prompt_ids = encode(problems, tokenizer)
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

    A solution is encoded behind its prompt, as sampling writes it: some tokenizers put a space mark
    before a text that stands alone. Only where its first characters would join the last token of
    the prompt, which sampling has already, it is encoded alone. Raises UsageError when nothing is
    left.
    """
    prompt_ids = encode(problems, tokenizer)
    texts = [problem.prompt + problem.solution for problem in problems]
    whole_ids = tokenizer(texts, verbose=False)["input_ids"] if problems else []
    pairs = []
    for problem, prompt, whole in zip(problems, prompt_ids, whole_ids, strict=True):
        solution = whole[len(prompt) :]
        if whole[: len(prompt)] != prompt:
            solution = tokenizer(problem.solution, add_special_tokens=False)["input_ids"]
            text = problem.prompt + problem.solution
            if tokenizer.decode(prompt + solution[1:], skip_special_tokens=True) == text:
                solution = solution[1:]  # without the space mark
        pairs.append((prompt, [*solution, tokenizer.eos_token_id]))
    kept = [pair for pair in pairs if len(pair[0]) + len(pair[1]) <= max_len]
    require(
        kept or not problems,
        f"all {len(problems)} problems have more than --max-model-len {max_len} tokens",
    )
    return kept
