"""Step rules on text, and their boundaries on tokens."""

import json
import os
import random

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from common import data, steps


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
    return data.make_chain_tokenizer() if request.param == "chain" else make_bpe(request.param)


def test_boundaries_are_where_the_text_says_on_tokens(tokenizer):
    text = "so 2-3=9 then\nok 9+8=7 now\n#### 7"
    ids = [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]
    ends, moved = steps.split_steps(ids, tokenizer, "line")
    assert ends[-1] == len(ids)
    texts = steps.step_texts(ids, ends, tokenizer)
    assert "".join(texts) == tokenizer.decode(ids, skip_special_tokens=True)
    assert len(texts) == 3 and moved == [False, False]
    assert texts[0].endswith("then\n") and texts[1].endswith("now\n")


def test_tokens_that_straddle_a_boundary_move_it():
    """A token "\\nb" holds the end of one step and the start of the next: the boundary moves behind
    it; where that leaves nothing, the step vanishes."""
    vocab = {token: i for i, token in enumerate(["a", "\n", "\nb", "\n\n", "c", "<eos>"])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="a"))
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")
    # "a\nbc": one boundary, after "\n", inside token 2
    assert steps.split_steps([0, 2, 4, 5], fast, "line") == ([2, 4], [True])
    # "a\n\nc": boundaries after each newline, both inside or at the end of token 3
    assert steps.split_steps([0, 3, 4], fast, "line") == ([2, 3], [True, False])
    # the boundary moves to the end of the response: no step is empty
    assert steps.split_steps([0, 2], fast, "line") == ([2], [True])
    assert steps.split_steps([5], fast, "line") == ([1], [])


def test_random_ids_never_raise_and_no_step_is_empty(tokenizer):
    """Half characters, lone bytes, special tokens in the middle: what a model can sample."""
    rng = random.Random(0)
    for _ in range(300):
        ids = [rng.randrange(len(tokenizer)) for _ in range(rng.randrange(1, 40))]
        for rule in steps.RULES:
            ends, _ = steps.split_steps(ids, tokenizer, rule)
            assert ends == sorted(set(ends)) and ends[0] > 0 and ends[-1] == len(ids)
