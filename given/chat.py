"""Chat models: a prompt becomes a user's message, written by the model's own template."""

from common import UsageError, ranks, require
from given.model import find_ends


def encode(tokenizer, prompts: list[str]) -> list[list[int]]:
    """Each prompt as a user's only message, then what the template writes before an answer.
    Templates with a thinking mode are told to turn it off."""
    return [apply(tokenizer, [{"role": "user", "content": prompt}], True) for prompt in prompts]


def apply(tokenizer, messages: list[dict], answers_next: bool) -> list[int]:
    return tokenizer.apply_chat_template(
        messages,
        add_generation_prompt=answers_next,
        enable_thinking=False,
        tokenize=True,
        return_dict=False,
    )


def encode_answers(tokenizer, problems: list, prompt_ids: list[list[int]]) -> list[list[int]]:
    """The solution of each problem and what ends it, as the template writes them after the prompt.
    Some templates write a past prompt differently; then the solution is encoded alone."""
    behind, end = len(find_behind(tokenizer)), find_end(tokenizer)
    found = []
    for problem, before in zip(problems, prompt_ids, strict=True):
        turns, answer = [{"role": "user", "content": problem.prompt}], problem.solution.strip()
        ids = apply(tokenizer, [*turns, {"role": "assistant", "content": answer}], False)
        after = ids[len(before) : len(ids) - behind]
        if ids[: len(before)] != before:
            after = tokenizer(answer, add_special_tokens=False)["input_ids"]
        found.append([*after, *end])
    return found


def find_behind(tokenizer) -> list[int]:
    """The ids that the template writes after any answer."""
    question = {"role": "user", "content": "a"}
    answers = [{"role": "assistant", "content": text} for text in "12"]
    ids, others = (apply(tokenizer, [question, answer], False) for answer in answers)
    pairs = zip(reversed(ids), reversed(others), strict=False)
    number = next((i for i, (one, other) in enumerate(pairs) if one != other), 0)
    return ids[len(ids) - number :]


def find_end(tokenizer) -> list[int]:
    """The ids with which the template ends an answer, up to the last special token: a model should
    learn to write them. The tokenizer's EOS where the template writes none."""
    behind, added = find_behind(tokenizer), tokenizer.added_tokens_decoder
    marks = {id for id, token in added.items() if token.special} | {*tokenizer.all_special_ids}
    last = max((i for i, id in enumerate(behind) if id in marks), default=-1)
    return behind[: last + 1] or [tokenizer.eos_token_id]


def check(args, tokenizer, config) -> None:
    """Raises UsageError where --chat cannot work; without it, notes that a template is not used."""
    template = getattr(tokenizer, "chat_template", None)
    if not args.chat:
        if template:
            ranks.say(f"note: {args.model} has a chat template; --chat would use it")
        return
    require(template, f"--chat: {args.model} has no chat template; leave out --chat")
    try:
        end = find_end(tokenizer)
    except Exception as error:  # of jinja, and what a template raises
        what = f"--chat: the chat template of {args.model} fails"
        raise UsageError(f"{what} ({' '.join(str(error).split())[:200]})") from None
    ends = {tokenizer.eos_token_id, *find_ends(args.model, config)}
    what = f"the chat template of {args.model} ends an answer with {tokenizer.decode(end)!r}"
    hint = "add it to eos_token_id in its generation_config.json, else responses will not end"
    require(ends & {*end}, f"--chat: {what}, which is not an EOS: {hint}")
