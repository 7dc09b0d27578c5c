"""Tasks: where problems come from, how they are graded and where their reasoning steps end.

`chain`  the embedded task: generated, seeded, needs no download (chain.py)
`gsm8k`  grade-school mathematics: from the hub, or a folder with train.jsonl and test.jsonl whose
         lines have "question" and "answer" (the solution, with the number behind "####")
`math`   competition mathematics, tested on MATH-500: from the hub, or such a folder whose lines
         have "problem" and "solution" (the answer in its last box), "answer" where it is known
`jsonl`  your own: a folder with <split>.jsonl or .parquet, or hub:OWNER/NAME; rows with "prompt",
         "answer" (of the number after "####" or, with --grading-rule boxed, of the last box) and,
         for sft.py, "solution", or what --prompt-field and its like call them
"""

import os
from typing import NamedTuple

from common import ranks, require
from given import chat
from tasks import chain
from tasks.mathematics import load_mathematics
from tasks.own import FIELDS, SPLITS, load_own


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


def find_task(args) -> Task:
    """That of --task; where your own problems are graded and cut into steps otherwise, so."""
    require(args.task in TASKS, f"--task {args.task}: no such task; there are {', '.join(TASKS)}")
    given = {"step_rule": args.step_rule, "grading_rule": args.grading_rule}
    given = {name: rule for name, rule in given.items() if rule != "auto"}
    what = "--step-rule and --grading-rule are for --task jsonl"
    require(not given or args.task == "jsonl", f"{what}; {args.task} has its own")
    return TASKS[args.task]._replace(**given)


def load_problems(
    task: str, split: str, data_dir: str = "", rule: str = "####", fields: tuple = FIELDS
) -> list[Problem]:
    """The problems of one split ("sft", "train", "validation" or "test"); `rule`: how your own are
    graded, `fields`: what their columns are called. Raises UsageError, naming the flag or the file
    and line, for what cannot be used."""
    require(split in SPLITS, f"--split {split}: no such split; there are {', '.join(SPLITS)}")
    on_hub = task == "jsonl" and data_dir.startswith("hub:")
    exists = not data_dir or on_hub or os.path.isdir(data_dir)
    hint = " (on the hub: hub:OWNER/NAME)" if task == "jsonl" else ""
    require(exists, f"--data-dir {data_dir}: no such folder{hint}")
    if task == "chain":
        return [Problem(*row) for row in chain.make_splits()[split]]
    if task == "jsonl":
        require(data_dir, f"--task {task} reads a folder of your own: name it with --data-dir")
        return [Problem(*row) for row in load_own(split, data_dir, rule, fields)]
    splits, missing = load_mathematics(task, "test" if split == "test" else "train", data_dir)
    where = data_dir or "the hub"
    require(
        split != "validation" or not missing,
        f"{where}: {missing} of the validation problems of {task} are not in its training set "
        "(--eval-every 0 does without)",
    )
    rows = splits["train" if split == "sft" else split]
    require(rows, f"{where}: no usable problem for {split}")
    return [Problem(*row) for row in rows]


# ---- for the scripts: problems, then prompts and solutions as ids --------------------------------


def load(args, split: str) -> list[Problem]:
    """All problems to train on; of those for validation the first --eval-problems, none where they
    are never asked for."""
    if split == "validation" and not args.eval_every:
        return []
    problems = load_split(args, split)
    return problems[: args.eval_problems] if split == "validation" else problems


def load_split(args, split: str) -> list[Problem]:
    fields = (args.prompt_field, args.answer_field, args.solution_field)
    return load_problems(args.task, split, args.data_dir, find_task(args).grading_rule, fields)


def fit(args, problems: list[Problem], tokenizer) -> tuple[list[Problem], list[list[int]]]:
    """The problems whose prompts leave room for a response, and those prompts as ids. Raises
    UsageError when nothing is left."""
    prompt_ids = encode(problems, tokenizer, args.chat)
    room = args.max_model_len - args.max_response_len
    kept = [i for i, ids in enumerate(prompt_ids) if len(ids) <= room]
    require(
        kept or not problems,
        f"all {len(problems)} prompts have more than {room} tokens "
        "(--max-model-len less --max-response-len): raise the first or lower the second",
    )
    say_dropped(len(problems), len(kept))
    return [problems[i] for i in kept], [prompt_ids[i] for i in kept]


def say_dropped(all_of_them: int, kept: int) -> None:
    if kept < all_of_them:
        ranks.say(f"{all_of_them - kept} of {all_of_them} problems dropped: too long (in tokens)")


def encode(problems: list[Problem], tokenizer, as_chat: bool = False) -> list[list[int]]:
    """The one place where a prompt becomes ids, so the one place where a BOS is added (where the
    tokenizer adds one). Raises UsageError for a prompt that has one already, that spells an EOS, or
    that is nothing to the tokenizer."""
    texts = [problem.prompt for problem in problems]
    for text in texts:
        what = f"the prompt {text!r:.60} spells the EOS token: take it out of the data"
        require(tokenizer.eos_token not in text, what)
    if as_chat:
        return chat.encode(tokenizer, texts)
    prompt_ids = to_ids(tokenizer, texts)
    for text, ids in zip(texts, prompt_ids, strict=True):
        what, bos = f"the prompt {text!r:.60}", tokenizer.bos_token
        require(ids, f"{what} has no token: the tokenizer knows none of its characters")
        two = ids[:2].count(tokenizer.bos_token_id) == 2
        hint = "and the tokenizer puts one before it: take it out of the data"
        require(not two, f"{what} begins with {bos!r}, {hint}")
    backs = tokenizer.batch_decode(prompt_ids, skip_special_tokens=True) if texts else []
    lost = [text for text, back in zip(texts, backs, strict=True) if text.strip() != back.strip()]
    if lost:
        what = f"prompts have characters that decoding does not give back: {lost[0]!r:.60}"
        ranks.say(f"note: {len(lost)} of {len(texts)} {what}")
    return prompt_ids


def to_ids(tokenizer, texts: list[str]) -> list[list[int]]:
    """Without the EOS that some tokenizers append (add_eos_token): the text will go on."""
    found = tokenizer(texts, verbose=False)["input_ids"] if texts else []
    appends = tokenizer("a")["input_ids"][-1:] == [tokenizer.eos_token_id]
    return [ids[:-1] for ids in found] if appends else found
