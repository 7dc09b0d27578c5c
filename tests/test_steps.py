"""Step rules on text, and their boundaries on tokens."""

import json
import os
import random
from types import SimpleNamespace

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

import vineppo
from common import sampling, steps
from tasks import chain


def split(rule, text):
    ends = steps.RULES[rule](text)
    return [text[start:end] for start, end in zip([0, *ends], ends, strict=False)]


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ("line", ["so 2-3=9 then\n", "ok 9+8=7 now\n", "#### 7"]),
        ("line", ["\n\nA=1\n", "B=2\n", "#### 3\n"]),
        ("line", ["A=1\n", "\n", "B=2"]),
        ("line", ["one line"]),
        ("line", ["\n\n\n"]),
        ("line", [""]),
        ("line", ["a\u2028b\r\n", "c"]),
        ("gsm8k", ["\nTom has 12.\n", "He eats 2, leaving 10.\n#### 10\n"]),
        ("gsm8k", ["\nA=1\n", "\n", "B=2\n#### 3"]),
        ("gsm8k", ["\nA=1\n", "B=2\n", "####3\n"]),  # no space: not the answer's form
        ("gsm8k", ["\n#### 5\n"]),
        ("gsm8k", ["\nOne line only"]),
        ("gsm8k", ["\nA=1\n#### 3\n#### 4\n"]),
        ("gsm8k", ["A=1\n", "B=2\n\n#### 3\n\nmore"]),
        ("gsm8k", ["#### 3"]),
        ("gsm8k", [""]),
    ],
)
def test_rules(rule, expected):
    assert split(rule, "".join(expected)) == expected


SUM = "\n$" + "+".join(map(str, range(1, 39))) + "=741$"
LONG = "\nThus $(x+1)(x+2)(x+3)=(x^2+3x+2)(x+3)=x^3+3x^2+2x+3x^2+9x+6=x^3+6x^2+11x+6,$"


@pytest.mark.parametrize(
    "expected",
    [
        [
            "\nWe first add the two numbers.",
            " The sum is 12. Therefore the answer is $\\boxed{12}$.",
        ],
        [
            "\nThe price is 3.5 dollars.",
            " We buy 1,000 items.",
            " So the total is 3,500 dollars.",
        ],
        [
            "\nLet A. Smith own x coins, e.g. Ten coins.",
            " Mr. Brown has 4 coins. Then x is 6.",
        ],
        ["\nWe have $a=2.$", " Then $b=a+1=3.$", " So $ab=\\boxed{6}.$"],
        ["\nFirst line without period", "\nSecond line here is long enough\n\nThird paragraph."],
        [
            "\nWe compute\n\\begin{align*}",
            "\nx+y&=10,\\\\",
            "\nx-y&=4.",
            "\n\\end{align*}Adding gives $2x=14,$ so $x=\\boxed{7}.$",
        ],
        [
            "\nNote that\n\\[x^2+2x+1=(x+1)^2.\\]",
            "Hence $x=-1$ is the only root.",
            " The answer is $\\boxed{-1}$.\n",
        ],
        [
            "\nSince the triangle is isosceles with two equal sides of length ten,",
            " the altitude from the apex bisects the base into two equal segments of length six"
            " each. Done.",
        ],
        [SUM[:56], SUM[56:]],  # "=" would leave less than 20 characters: "+" it is
        [LONG, " which is the desired expansion of the product."],
        [
            "\nConsider the figure. [asy]",
            "\ndraw((0,0)--(1,0));",
            "\ndraw((0,0)--(0,1));",
            "\n[/asy] The area is $\\frac12$.",
        ],
        ["\nHe pays \\$5 per item.", " She pays \\$7 per item.", " The difference is \\$2."],
        [
            "\nThe mean is $\\frac{3.5+4.5}{2}=4.$",
            " Since there are 1,000 terms, the sum equals $4\\cdot 1{,}000=\\boxed{4000}$.\n\n",
        ],
        ["\nIs it prime? No it is not prime because it is even! Therefore the answer is 4."],
        ["\nWe solve for x. Then we solve for y. Finally we solve for z in the last equation."],
        [
            "\n1. First we compute the sum of the roots.",
            "\n2. Then we compute the product.",
            "\n3. The answer is $\\boxed{7}$.",
        ],
        [
            "\nBy symmetry \\(a=b.\\)",
            " Hence \\(a+b=2a.\\)",
            " The final answer is \\(\\boxed{4}.\\)",
        ],
        ["\nWe start by noting that $x^2 + y^2 = 25$ and"],
        ["\n" + 38 * "a" + ",", " " + 70 * "b"],  # a half of exactly 40 characters
        # a formula counts as 60 characters, so the second line joins the third one, not the first
        ["\n$x=1$\nand then we go\nto the second long line of it."],
        ["\n$\\boxed{5}$"],  # the official code loses it
        ["\nHe paid $5 for each item.", " She paid $7 for each item."],  # money is no formula
        [  # a dollar inside a displayed formula is part of it
            "\nSo we get\n\\begin{align*}",
            "\nx&=1\\text{ if $y>0$},\\\\",
            "\nx&=2\\text{ if $y<0$}.",
            "\n\\end{align*}",
        ],
        [""],
    ],
)
def test_math_rule(expected):
    assert split("math", "".join(expected)) == expected


SHARED = os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../shared/data")


@pytest.mark.skipif(not os.path.isdir(SHARED), reason="no data beside the clone")
@pytest.mark.parametrize(("rule", "task"), [("math", "math"), ("gsm8k", "gsm8k")])
def test_rules_are_lossless_on_the_reference_solutions(rule, task):
    for name in ("train", "test"):
        with open(f"{SHARED}/{task}/{name}.jsonl") as file:
            for line in file:
                row = json.loads(line)
                text = "\n" + row["solution" if task == "math" else "answer"] + "\n"
                parts = split(rule, text)
                assert "".join(parts) == text and all(parts)


@pytest.mark.parametrize("rule", steps.RULES)
def test_rules_are_lossless_on_anything(rule):
    rng = random.Random(0)
    pieces = [
        *"\n\n#### a1.\r\u2028é😀$$",
        "\\[",
        "\\]",
        "\\(",
        ". A",
        "\\begin{a}",
        "\\end{a}",
        "=",
        ",",
    ]
    for _ in range(3000):
        text = "".join(rng.choice(pieces) for _ in range(rng.randrange(60)))
        parts = split(rule, text)
        assert "".join(parts) == text and (all(parts) or text == "")


def make_bpe(kind):
    """A small BPE whose merges cross lines, byte-level or as in SentencePiece (▁ for spaces,
    unknown characters as bytes)."""
    lines = ["He has 3 apples.\nShe has 4.\n#### 7\n\n", "Löwe 🦁 isst\nµ = 2\n"] * 50
    special = ["<eos>"]
    if kind == "byte":
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    else:
        tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<eos>"))
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
        tokenizer.decoder = decoders.Sequence(
            [
                decoders.Replace("▁", " "),
                decoders.ByteFallback(),
                decoders.Fuse(),
                decoders.Strip(" ", 1, 0),
            ]
        )
        special += [f"<0x{byte:02X}>" for byte in range(256)]
        alphabet = []
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(lines, trainer)
    saved = json.loads(tokenizer.to_str())  # bytes are ordinary tokens, as in SentencePiece
    saved["added_tokens"] = [t for t in saved["added_tokens"] if t["content"] == "<eos>"]
    tokenizer = Tokenizer.from_str(json.dumps(saved))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<eos>", clean_up_tokenization_spaces=False
    )


@pytest.fixture(scope="module", params=["byte", "sentencepiece", "chain"])
def tokenizer(request):
    return chain.make_tokenizer() if request.param == "chain" else make_bpe(request.param)


def test_boundaries_are_where_the_text_says_on_tokens(tokenizer):
    text = "so 2-3=9 then\nok 9+8=7 now\n#### 7"
    ids = [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]
    ends = steps.split_steps(ids, tokenizer, "line")
    assert ends[-1] == len(ids)
    texts = steps.step_texts(ids, ends, tokenizer)
    assert "".join(texts) == tokenizer.decode(ids, skip_special_tokens=True)
    assert len(texts) == 3
    assert texts[0].endswith("then\n") and texts[1].endswith("now\n")


def test_tokens_that_straddle_a_boundary_move_it():
    """A token "\\nb" holds the end of one step and the start of the next: the boundary moves behind
    it; where that leaves nothing, the step vanishes."""
    vocab = {token: i for i, token in enumerate(["a", "\n", "\nb", "\n\n", "c", "<eos>"])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="a"))
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")
    # "a\nbc": one boundary, after "\n", inside token 2
    assert steps.split_steps([0, 2, 4, 5], fast, "line") == [2, 4]
    # "a\n\nc": boundaries after each newline, both inside or at the end of token 3
    assert steps.split_steps([0, 3, 4], fast, "line") == [2, 3]
    # the boundary moves to the end of the response: no step is empty
    assert steps.split_steps([0, 2], fast, "line") == [2]
    assert steps.split_steps([5], fast, "line") == [1]


# ---- a stop string -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pieces", "stop", "kept"),
    [
        (["#### 72", "\n\n\n", "Problem", ":"], "\n\n\nProblem:", 1),
        (["so", "\n", "####"], "\n####", 1),
        (["so", "\n", "now", "\n", "####"], "\n####", 3),  # the first newline is no stop string
        (["so", "Problem"], "Problem", 1),
        (["72\n", "\n\nProblem"], "\n\n\nProblem", 1),  # what begins before it stays
        (["7", "2 \n\n\nProblem"], "\n\n\nProblem", 2),
        (["so", " ", "stop"], "stop", 2),
        (["so", "<pad>", "stop"], "stop", 1),
        (["so", "\n", "<pad>", "####"], "\n####", 1),  # vLLM does not see special tokens either
        (["so", " stop"], "stop", 1),  # it has nothing of the text but a space
        (["stop"], "stop", 0),
    ],
)
def test_a_stop_string_is_cut_off_whole(pieces, stop, kept):
    """All tokens that begin inside it are cut off, and their log-probs with them."""
    vocab = {piece: i for i, piece in enumerate(dict.fromkeys(pieces))}
    ids = [vocab[piece] for piece in pieces]
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token=pieces[0]))
    tokenizer.decoder = decoders.Fuse()
    sampler = sampling.Sampler.__new__(sampling.Sampler)
    sampler.args = SimpleNamespace(stop=stop)
    sampler.tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>")
    logprobs = [{i: SimpleNamespace(logprob=-float(t))} for t, i in enumerate(ids)]
    answer = SimpleNamespace(token_ids=ids, logprobs=logprobs, finish_reason="stop")
    answer.stop_reason = stop
    read = sampler.read(answer)
    assert read == (ids[:kept], [-float(t) for t in range(kept)], True, True)
    answer.stop_reason = None  # it ended on EOS
    assert sampler.read(answer).ids == ids and not sampler.read(answer).stopped


def test_a_stop_string_between_spaces(tokenizer):
    ids = tokenizer("so 2-3=9 then\nok 5+1=6 now\n")["input_ids"]
    sampler = sampling.Sampler.__new__(sampling.Sampler)
    sampler.tokenizer, sampler.args = tokenizer, SimpleNamespace(stop="5+1")
    answer = SimpleNamespace(token_ids=ids, logprobs=None, finish_reason="stop", stop_reason="5+1")
    kept = sampler.read(answer).ids
    assert tokenizer.decode(kept).rstrip() == "so 2-3=9 then\nok"


# ---- EOS -----------------------------------------------------------------------------------------


def test_no_boundary_falls_inside_a_character():
    """Half a character decodes to as many characters as the text before the boundary has."""
    tokenizer = make_bpe("sentencepiece")
    ids = tokenizer("\U0001f600\nabc")["input_ids"]
    ends = steps.split_steps(ids, tokenizer, "line")
    assert steps.step_texts(ids, ends, tokenizer) == ["\U0001f600\n", "abc"]


@pytest.mark.parametrize(
    ("rule", "text", "own_step"),
    [
        ("line", "so 2-3=9 then\n", True),
        ("line", "so 2-3=9 then\n\n", True),
        ("line", "so 2-3=9 then\n#### 9", False),
        ("line", "\n\n", False),  # leading blank lines join the first line, which is still to come
        ("line", "", False),
        ("gsm8k", "so 2-3=9 then\n", True),
        ("gsm8k", "so 2-3=9 then\n#### 9\n", False),  # all of it is the answer's step
        ("math", "so 2-3=9 then now well we see that it is so\n", False),  # 20 characters at least
    ],
)
def test_eos_is_a_step_of_its_own_where_a_step_ends_before_it(rule, text, own_step):
    """Whether a state is valued must not depend on the token that follows, be it EOS."""
    tokenizer = chain.make_tokenizer()
    ids = tokenizer(text)["input_ids"] if text else []
    ends = steps.split_steps([*ids, tokenizer.eos_token_id], tokenizer, rule)
    assert (len(ids) in ends) == own_step
    if ids:  # cut off at the limit there is nothing behind the newline
        assert steps.split_steps(ids, tokenizer, rule)[-1] == len(ids)


# ---- is the expected estimate the gradient? ------------------------------------------------------

PIECES = ["<eos>", "so", "now", "\n", "#### 7", "A sentence of some length.", " Then more"]


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A token for each piece; a text is its pieces, joined."""
    vocab = {token: i for i, token in enumerate(PIECES)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="so"))
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")


def enumerate_policy(tree: dict, prefix: tuple = (), chance: float = 1.0):
    """(ids, probability) of every response; `tree`: a prefix's next ids with their chances."""
    if prefix not in tree:
        yield prefix, chance
        return
    for i, p in tree[prefix].items():
        yield from enumerate_policy(tree, (*prefix, i), chance * p)


def gradients(tree: dict, reward: dict, rule: str) -> tuple[dict, dict]:
    """Of the mean reward with respect to the logit of each choice: as it is, and as VinePPO's
    estimate is on average, with exact values. Noise of the values averages out."""
    tokenizer, responses = make_tokenizer(), dict(enumerate_policy(tree))

    def value(prefix: tuple) -> float:
        odds = {ids: p for ids, p in responses.items() if ids[: len(prefix)] == prefix}
        return sum(p * reward[ids] for ids, p in odds.items()) / sum(odds.values())

    values = {ids[:n]: 0.0 for ids in responses for n in range(len(ids))}
    values = {prefix: value(prefix) for prefix in values}
    true, found = {}, {}
    for prefix, choices in tree.items():
        reached = sum(p for ids, p in responses.items() if ids[: len(prefix)] == prefix)
        for i, p in choices.items():
            after = values.get((*prefix, i), reward.get((*prefix, i)))
            true[prefix, i], found[prefix, i] = reached * p * (after - values[prefix]), 0.0
    for ids, p in responses.items():
        ends = steps.split_steps(list(ids), tokenizer, rule)
        advantages = vineppo.compute_advantages(
            torch.tensor([reward[ids]]),
            [[values[ids[:start]] for start in [0, *ends[:-1]]]],
            [ends],
            torch.ones(1, len(ids)),
        )[0].tolist()
        for t, advantage in enumerate(advantages):
            for i, q in tree[ids[:t]].items():
                found[ids[:t], i] += p * advantage * ((i == ids[t]) - q)
    return true, found


def random_tree(depth: int) -> tuple[dict, dict]:
    """Any piece after any prefix, with random chances; rewards at random. EOS ends a response."""
    rng, choices = random.Random(1), range(len(PIECES))
    tree, open_prefixes = {}, [()]
    for _ in range(depth):
        for prefix in open_prefixes:
            weights = [rng.random() + 0.1 for _ in choices]
            tree[prefix] = dict(zip(choices, (w / sum(weights) for w in weights), strict=True))
        open_prefixes = [(*p, i) for p in open_prefixes for i in choices[1:]]
    return tree, {ids: rng.random() for ids, _ in enumerate_policy(tree)}


@pytest.fixture
def float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(("rule", "unbiased"), [("line", True), ("gsm8k", False), ("math", False)])
def test_for_which_rules_the_expected_estimate_is_the_gradient(rule, unbiased, float64):
    """All responses of up to four tokens. The other two rules look at what follows: at the answer
    behind a newline, at the length of a sentence (docs/departures.md)."""
    true, found = gradients(*random_tree(4), rule)
    error = max(abs(found[choice] - true[choice]) for choice in true)
    assert (error < 1e-12) == unbiased and max(map(abs, true.values())) > 0.01
    if not unbiased:
        assert error > 1e-4


def test_a_newline_before_eos_by_hand():
    """Two first words, a newline, then EOS or one word more. With the state behind the newline left
    out where EOS follows, the estimate of the first choice was +0.1073."""
    eos, so, now, newline, seven = range(5)
    tree = {(): {so: 0.5, now: 0.5}, (so,): {newline: 1.0}, (now,): {newline: 1.0}}
    for word, ends in ((so, 0.371), (now, 0.5814)):
        tree[word, newline] = {eos: ends, seven: 1 - ends}
    reward = {ids: float((ids[0] == so) == (ids[-1] == eos)) for ids, _ in enumerate_policy(tree)}
    true, found = gradients(tree, reward, "line")
    assert true[(), so] == pytest.approx(-0.0119) == found[(), so]


def test_random_ids_never_raise_and_no_step_is_empty(tokenizer):
    """Half characters, lone bytes, special tokens in the middle: what a model can sample."""
    rng = random.Random(0)
    for _ in range(300):
        ids = [rng.randrange(len(tokenizer)) for _ in range(rng.randrange(1, 40))]
        for rule in steps.RULES:
            ends = steps.split_steps(ids, tokenizer, rule)
            assert ends == sorted(set(ends)) and ends[0] > 0 and ends[-1] == len(ids)


# ---- long responses ------------------------------------------------------------------------------


def test_a_prefix_decoded_in_blocks_is_the_prefix(tokenizer):
    rng = random.Random(0)
    texts = ["He has 3 apples.\nLöwe 🦁 isst\nµ = 2\n  so\n" * 9, " 1 \n" * 20, "7+6=3 so\n" * 20]
    of_texts = [tokenizer(text)["input_ids"] for text in texts]
    random_ids = [[rng.randrange(len(tokenizer)) for _ in range(60)] for _ in range(60)]
    for ids in [*of_texts, *random_ids]:
        for block in (7, 16):
            decode_until = steps.prefix_decoder(ids, tokenizer, block)
            for n in range(len(ids) + 1):
                assert decode_until(n) == tokenizer.decode(ids[:n], skip_special_tokens=True)


@pytest.mark.parametrize("line", ["7\n", "\u6f22\u5b57\n"])  # a token; three bytes a sign
def test_thousands_of_lines_take_no_longer_than_they_have_tokens(line):
    """Counts decoded tokens, not seconds: they once grew with the square of the length."""
    tokenizer, decoded = make_bpe("byte"), []
    decode = tokenizer.decode
    tokenizer.decode = lambda ids, **flags: decoded.append(len(ids)) or decode(ids, **flags)
    for lines in (500, 1000):
        ids = tokenizer(line * lines)["input_ids"]
        assert len(steps.split_steps(ids, tokenizer, "line")) == pytest.approx(lines, abs=1)
        decoded.append(None)
    half, whole, _ = "".join(f"{n}," for n in decoded).split("None,")
    half, whole = (sum(int(n) for n in part.split(",") if n) for part in (half, whole))
    assert whole < 2.6 * half
