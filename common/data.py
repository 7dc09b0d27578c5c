"""Tasks: where problems come from, how they are graded and where their reasoning steps end.

`chain`  the embedded task: generated from a seed, no download (tasks/chain.py)
`gsm8k`  grade-school mathematics: from the hub, or a folder with train.jsonl and test.jsonl whose
         lines have "question" and "answer" (the solution, with the number after "####")
`math`   competition mathematics, tested on MATH-500: from the hub, or such a folder whose lines
         have "problem", "solution" (the answer in its last box) and, if it is known, "answer"
`jsonl`  your own: a folder with <split>.jsonl or .parquet, or hub:OWNER/NAME; rows with "prompt",
         "answer" and, for sft.py, "solution" (--prompt-field and its like name other columns).
         Responses give the answer after "####" or, with --grading-rule boxed, in the last box
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
    """The task of --task, with --grading-rule and --step-rule if those are given."""
    require(args.task in TASKS, f"--task {args.task}: no such task; choose from {', '.join(TASKS)}")
    given = {"step_rule": args.step_rule, "grading_rule": args.grading_rule}
    given = {name: rule for name, rule in given.items() if rule != "auto"}
    what = "--step-rule and --grading-rule are for --task jsonl only"
    require(not given or args.task == "jsonl", f"{what}; {args.task} has its own rules")
    return TASKS[args.task]._replace(**given)


def load_problems(
    task: str, split: str, data_dir: str = "", rule: str = "####", fields: tuple = FIELDS
) -> list[Problem]:
    """The problems of one split ("sft", "train", "validation" or "test"). For your own, `rule` says
    how they are graded and `fields` what their columns are called. Raises UsageError, which names
    the flag or the file and line, for what cannot be used."""
    require(split in SPLITS, f"--split {split}: no such split; choose from {', '.join(SPLITS)}")
    on_hub = task == "jsonl" and data_dir.startswith("hub:")
    exists = not data_dir or on_hub or os.path.isdir(data_dir)
    hint = " (for a data set on the hub: hub:OWNER/NAME)" if task == "jsonl" else ""
    require(exists, f"--data-dir {data_dir}: no such folder{hint}")
    if task == "chain":
        return [Problem(*row) for row in chain.make_splits()[split]]
    if task == "jsonl":
        require(data_dir, f"--task {task} needs --data-dir, the folder with your problems")
        return [Problem(*row) for row in load_own(split, data_dir, rule, fields)]
    splits, missing = load_mathematics(task, "test" if split == "test" else "train", data_dir)
    where = data_dir or "the hub"
    require(
        split != "validation" or not missing,
        f"{where}: {missing} of the validation problems of {task} are not in its training set "
        "(--eval-every 0 skips evaluation)",
    )
    rows = splits["train" if split == "sft" else split]
    require(rows, f"{where}: no usable problem for {split}")
    return [Problem(*row) for row in rows]


# ---- for the scripts: problems, then prompts and solutions as ids --------------------------------


def load(args, split: str) -> list[Problem]:
    """The problems of a split; none for validation with --eval-every 0."""
    if split == "validation" and not args.eval_every:
        return []
    return load_split(args, split)


def load_split(args, split: str) -> list[Problem]:
    fields = (args.prompt_field, args.answer_field, args.solution_field)
    return load_problems(args.task, split, args.data_dir, find_task(args).grading_rule, fields)


def fit(
    args, problems: list[Problem], tokenizer, most: int | None = None
) -> tuple[list[Problem], list[list[int]]]:
    """The first `most` problems whose prompts leave room for a response (None: all of these), and
    those prompts as ids. Raises UsageError when nothing is left."""
    prompt_ids = encode(problems, tokenizer, args.chat)
    room = args.max_model_len - args.max_response_len
    kept = [i for i, ids in enumerate(prompt_ids) if len(ids) <= room]
    require(
        kept or not problems,
        f"all {len(problems)} prompts have more than {room} tokens "
        "(--max-model-len minus --max-response-len): raise the first or lower the second",
    )
    say_dropped(len(problems), len(kept))
    return [problems[i] for i in kept[:most]], [prompt_ids[i] for i in kept[:most]]


def say_dropped(all_of_them: int, kept: int) -> None:
    if kept < all_of_them:
        ranks.say(f"{all_of_them - kept} of {all_of_them} problems dropped: too many tokens")


def encode(problems: list[Problem], tokenizer, as_chat: bool = False) -> list[list[int]]:
    """Prompts become ids only here, so the start token BOS is added only here, if the tokenizer
    adds one. Raises UsageError for a prompt that has one already, that contains the end token EOS,
    or of which the tokenizer makes no token."""
    texts = [problem.prompt for problem in problems]
    for text in texts:
        what = f"the prompt {text!r:.60} contains the EOS token: remove it from the data"
        require(tokenizer.eos_token not in text, what)
    if as_chat:
        return chat.encode(tokenizer, texts)
    prompt_ids = to_ids(tokenizer, texts)
    for text, ids in zip(texts, prompt_ids, strict=True):
        what, bos = f"the prompt {text!r:.60}", tokenizer.bos_token
        require(ids, f"{what} becomes no token: the tokenizer knows none of its characters")
        two = ids[:2].count(tokenizer.bos_token_id) == 2
        hint = "and the tokenizer adds another: remove it from the data"
        require(not two, f"{what} begins with {bos!r}, {hint}")
    backs = tokenizer.batch_decode(prompt_ids, skip_special_tokens=True) if texts else []
    lost = [text for text, back in zip(texts, backs, strict=True) if text.strip() != back.strip()]
    if lost:
        what = f"prompts have characters that the tokenizer does not keep: {lost[0]!r:.60}"
        ranks.say(f"note: {len(lost)} of {len(texts)} {what}")
    return prompt_ids


def to_ids(tokenizer, texts: list[str]) -> list[list[int]]:
    """Ids without the EOS that some tokenizers append (add_eos_token): the text goes on."""
    found = tokenizer(texts, verbose=False)["input_ids"] if texts else []
    appends = tokenizer("a")["input_ids"][-1:] == [tokenizer.eos_token_id]
    return [ids[:-1] for ids in found] if appends else found
