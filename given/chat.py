"""Chat models: a prompt becomes a user's message, as the model's own template writes it."""

from common import ranks, require
from given.model import find_ends


def encode(tokenizer, prompts: list[str]) -> list[list[int]]:
    """Each prompt as the only message of a user, then what the template writes before an answer
    (without thinking, where it knows that)."""
    return [apply(tokenizer, [{"role": "user", "content": prompt}], True) for prompt in prompts]


def apply(tokenizer, messages: list[dict], answers_next: bool) -> list[int]:
    return tokenizer.apply_chat_template(
        messages,
        add_generation_prompt=answers_next,
        enable_thinking=False,
        tokenize=True,
        return_dict=False,
    )


def find_end(tokenizer) -> int:
    """The id with which the template ends an answer: what a model should learn to write there."""
    question = {"role": "user", "content": "a"}
    answers = [{"role": "assistant", "content": text} for text in "12"]
    ids, others = (apply(tokenizer, [question, answer], False) for answer in answers)
    behind: list[int] = []  # the answer, the same in both
    for one, other in zip(reversed(ids), reversed(others), strict=False):
        if one != other:
            break
        behind.insert(0, one)
    special = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
    return next((one for one in behind if one in special), tokenizer.eos_token_id)


def check(args, tokenizer, config) -> None:
    """Raises UsageError where --chat cannot be had; says where it is not used."""
    if not args.chat:
        if getattr(tokenizer, "chat_template", None):
            ranks.say(f"note: {args.model} has a chat template; prompts are plain text (--chat)")
        return
    has_template = getattr(tokenizer, "chat_template", None)
    require(has_template, f"--chat: {args.model} has no chat template")
    end, ends = find_end(tokenizer), {tokenizer.eos_token_id, *find_ends(args.model, config)}
    what = f"the template of {args.model} ends an answer with {tokenizer.decode([end])!r}"
    hint = "which is no EOS of its tokenizer or generation_config.json: responses would not end"
    require(end in ends, f"--chat: {what}, {hint}")
