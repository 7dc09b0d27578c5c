"""The embedded task, files and prompts."""

import dataclasses
import json
import os
import re
import subprocess
import sys
from collections import Counter
from types import SimpleNamespace

import pytest
import tyro
from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

import evaluate
import sft
import vineppo
from common import UsageError, data, engines
from common.grading import RULES, grade
from mathequal import extract_boxed, grade_boxed
from recipes import sometimes
from tasks import chain, mathematics
from tests.conftest import ROOT, read_jsonl
from tests.test_steps import make_bpe

DATA = os.path.join(ROOT, "..", "shared", "data")
GSM8K = os.path.join(DATA, "gsm8k")
MATH = os.path.join(DATA, "math")
needs_data = pytest.mark.skipif(not os.path.isdir(DATA), reason="no data sets beside the clone")


@pytest.fixture(scope="module")
def problems_of():
    return {split: data.load_problems("chain", split) for split in chain.SPLITS}


def test_chain_splits_are_disjoint_and_always_the_same(problems_of):
    prompts = [problem.prompt for problems in problems_of.values() for problem in problems]
    assert len(prompts) == len(set(prompts)) == sum(chain.SPLITS.values())
    assert problems_of["test"] == data.load_problems("chain", "test")
    # one known problem: another Python or another order of draws would move it
    assert (
        problems_of["train"][0].prompt == "7-2+7-8+4-4-3+3-9=?\n"
        and problems_of["train"][0].answer == "5"
    )


def test_chain_answers_are_true_and_the_demonstrator_slips_as_described(problems_of):
    slips, facts = {}, {}
    for problem in problems_of["sft"]:
        expression = problem.prompt.removesuffix("=?\n")
        digits = [int(d) for d in re.findall(r"\d", expression)]
        operations = re.findall(r"[+-]", expression)
        signed = [d if op == "+" else -d for op, d in zip(operations, digits[1:], strict=True)]
        assert int(problem.answer) == (digits[0] + sum(signed)) % 10
        lines = problem.solution.split("\n")
        assert len(lines) == 9 and lines[-1].startswith("#### ")
        for line in lines[:-1]:
            first, equation, last = line.split(" ")
            assert first in chain.FILLERS and last in chain.FILLERS
            a, op, b, result = re.fullmatch(r"(\d)([+-])(\d)=(\d)", equation).groups()
            offset = (int(result) - chain.apply_operation(int(a), op, int(b))) % 10
            facts[a, op, b] = facts.get((a, op, b), 0) + 1
            if offset:
                slips.setdefault((a, op, b), []).append(offset)
    assert len(facts) == 160 and len(slips) == 80
    for fact, offsets in slips.items():
        assert len(set(offsets)) == 1 and offsets[0] in (1, 2, 3)
        assert 0.4 < len(offsets) / facts[fact] < 0.6


def test_chain_share_of_right_demonstrations(problems_of):
    """About (1 - 1/4)^8 = 0.10, and the slips that cancel."""
    right = [grade(problem.solution, problem.answer) for problem in problems_of["sft"]]
    assert 0.08 < sum(right) / len(right) < 0.2


def test_chain_tokenizer_is_lossless(problems_of):
    tokenizer = chain.make_tokenizer()
    assert len(tokenizer) == 34
    for problem in problems_of["sft"][:500]:
        for text in (problem.prompt, problem.solution):
            assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
        assert len(tokenizer(problem.prompt)["input_ids"]) == 20
        assert len(tokenizer(problem.solution)["input_ids"]) == 66
    import random

    rng = random.Random(0)
    for _ in range(500):  # anything a model can write, prefixes included
        ids = [rng.randrange(2, 34) for _ in range(20)]
        text = tokenizer.decode(ids)
        assert tokenizer(text)["input_ids"] == ids
        assert all(text.startswith(tokenizer.decode(ids[:n])) for n in range(20))


# ---- files ---------------------------------------------------------------------------------------


def write(folder, text, name="train.jsonl"):
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(path)


def test_jsonl_with_bom_crlf_blank_lines_and_line_separators(tmp_path):
    separator = "\u2028"
    rows = [{"prompt": f"a{separator}b", "answer": "1"}, {"prompt": "c", "answer": "2"}]
    lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    write(tmp_path, b"\xef\xbb\xbf" + (lines[0] + "\r\n\r\n" + lines[1]).encode())
    problems = data.load_problems("jsonl", "train", str(tmp_path))
    assert problems == [(f"a{separator}b", "1", None), ("c", "2", None)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "empty"),
        ("\n\n", "empty"),
        ('{"prompt": "a", "answer": "1"}\n{"prompt": ', "train.jsonl:2: not JSON"),
        ("[1, 2]\n", "train.jsonl:1: a line must be a JSON object, found list"),
        ('{"prompt": "a"}\n', 'train.jsonl:1: "answer" must be a non-empty string, found None'),
        ('{"prompt": "a", "answer": " "}\n', 'train.jsonl:1: "answer" must be a non-empty string'),
        ('{"prompt": "a", "answer": 7}\n', 'train.jsonl:1: "answer" must be a non-empty string'),
        (
            '{"prompt": "a", "answer": "1", "solution": 1}\n',
            '"solution" must be a non-empty string',
        ),
        (
            '{"id": 7, "prompt": "a", "answer": "1"}\n\n{"id": 7, "prompt": "b", "answer": "1"}\n',
            "train.jsonl:3: the id 7 is also in",
        ),
        (b"\xff\xfe{", "not UTF-8"),
        ("[" * 100_000, "train.jsonl:1: not JSON"),
        ('{"id": 1' + "0" * 5000 + "}", "train.jsonl:1: not JSON"),
        ('{"prompt": "\\ud800 x", "answer": "1"}', '"prompt" has half of a character'),
        (
            '{"prompt": "a", "answer": "yes"}\n',
            "train.jsonl:1: the answer 'yes' is not a plain number",
        ),
    ],
)
def test_unusable_files_are_named(tmp_path, text, message):
    write(tmp_path, text)
    with pytest.raises(UsageError, match=re.escape(message)):
        data.load_problems("jsonl", "train", str(tmp_path))


def test_sft_file_falls_back_to_train(tmp_path):
    write(tmp_path, '{"prompt": "a", "answer": "1", "solution": "#### 1"}\n')
    assert data.load_problems("jsonl", "sft", str(tmp_path))[0].solution == "#### 1"
    write(tmp_path, '{"prompt": "b", "answer": "1"}\n', "sft.jsonl")
    assert data.load_problems("jsonl", "sft", str(tmp_path))[0].prompt == "b"


@needs_data
def test_gsm8k_split(tmp_path):
    splits = {name: data.load_problems("gsm8k", name, GSM8K) for name in ("train", "validation")}
    test = data.load_problems("gsm8k", "test", GSM8K)
    assert (len(splits["train"]), len(splits["validation"]), len(test)) == (7100, 373, 1319)
    prompts = [{problem.prompt for problem in problems} for problems in (*splits.values(), test)]
    assert (
        not prompts[0] & prompts[1] and not prompts[0] & prompts[2] and not prompts[1] & prompts[2]
    )
    with open(os.path.join(GSM8K, "train.jsonl"), encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    # another order of rows, and U+2028 written as itself
    backwards = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in reversed(rows))
    write(tmp_path, backwards)
    assert data.load_problems("gsm8k", "validation", str(tmp_path)) == splits["validation"]
    for problem in splits["train"]:
        assert "<<" not in problem.solution and grade(problem.solution, problem.answer) == 1
        assert problem.prompt.startswith("[MATH_TASK] Problem:\n")
        assert problem.prompt.endswith("\n\nSolution:")


def test_gsm8k_without_marker(tmp_path):
    write(tmp_path, '{"question": "q", "answer": "72"}\n')
    with pytest.raises(UsageError, match=r"train\.jsonl:1: the answer has no '####'"):
        data.load_problems("gsm8k", "train", str(tmp_path))


def test_problems_that_are_right_sometimes(tmp_path, monkeypatch):
    questions = [f"What is {i}?" for i in range(6)] + ["long " * 50]
    rows = [{"question": text, "answer": f"so \u2028 {len(text)}\n#### 4"} for text in questions]
    lines = [json.dumps(row, ensure_ascii=False) + "\r\n" for row in rows]
    write(tmp_path, "\ufeff" + "\n".join(lines))
    write(tmp_path, "as it is\n", "test.jsonl")
    every = [problem.prompt for problem in data.load_problems("gsm8k", "train", str(tmp_path))]
    order = [next(i for i in range(7) if questions[i].strip() in prompt) for prompt in every]
    rate_of = {0: 0.25, 1: 0.0, 2: 1.0, 3: 0.75, 4: 0.5, 5: 0.0}
    scores = [rate_of[i] for i in order if i in rate_of]
    made = {"task": "gsm8k", "data_dir": str(tmp_path), "split": "train", "max_model_len": 200}
    args = dataclasses.asdict(evaluate.Args(**made))
    rates, output = tmp_path / "rates.json", tmp_path / "new"
    monkeypatch.setattr(engines, "load_tokenizer", lambda args: ByT5Tokenizer())
    for other in ({"split": "test"}, {"task": "chain"}, {"data_dir": ""}):
        rates.write_text(json.dumps({**args, **other, "scores": scores}))
        with pytest.raises(UsageError, match="not of --split train and GSM8K or MATH from a"):
            sometimes.main(str(rates), str(output))
    rates.write_text(json.dumps({**args, "scores": scores[1:]}))
    with pytest.raises(UsageError, match=r"rates.json is of other problems than .*: run evaluate"):
        sometimes.main(str(rates), str(output))
    rates.write_text(json.dumps({**args, "scores": scores}))
    os.rename(tmp_path / "test.jsonl", tmp_path / "apart")
    with pytest.raises(UsageError, match=r"test\.jsonl: no such file"):
        sometimes.main(str(rates), str(output))
    os.rename(tmp_path / "apart", tmp_path / "test.jsonl")
    sometimes.main(str(rates), str(output))
    assert (output / "train.jsonl").read_bytes() == "".join(lines[i] for i in (0, 3, 4)).encode()
    assert (output / "test.jsonl").read_text() == "as it is\n"
    with pytest.raises(UsageError, match="new exists already"):
        sometimes.main(str(rates), str(output))
    with pytest.raises(UsageError, match="nowhere: no such file"):
        sometimes.main("nowhere", str(output))


@needs_data
def test_of_the_training_problems_only_the_validation_problems_stay(tmp_path, monkeypatch):
    args = evaluate.Args(task="gsm8k", data_dir=GSM8K, split="train", max_model_len=200)
    monkeypatch.setattr(engines, "load_tokenizer", lambda args: ByT5Tokenizer())
    problems = data.load_problems("gsm8k", "train", GSM8K)
    kept, _ = data.fit(args, problems, ByT5Tokenizer())
    scores = [0.5, *[0.0] * (len(kept) - 1)]
    (tmp_path / "rates").write_text(json.dumps({**dataclasses.asdict(args), "scores": scores}))
    sometimes.main(str(tmp_path / "rates"), str(tmp_path / "new"))
    assert data.load_problems("gsm8k", "train", str(tmp_path / "new")) == kept[:1]
    for split in ("validation", "test"):
        found = data.load_problems("gsm8k", split, str(tmp_path / "new"))
        assert found == data.load_problems("gsm8k", split, GSM8K)


def math_row(problem, solution, **fields):
    return json.dumps({"problem": problem, "solution": solution, **fields}) + "\n"


def test_math_rows(tmp_path, capsys):
    write(
        tmp_path,
        math_row("a", r"First \boxed{1}, so \boxed{\frac{1}{2}}.")
        + math_row("b", "none", unique_id="x")
        + math_row(" c ", "none either", answer="(1,2)")
        + math_row("d", r"empty \boxed{}"),
    )
    problems = data.load_problems("math", "train", str(tmp_path))
    assert {(p.prompt, p.answer) for p in problems} == {
        ("[MATH_TASK] Problem:\na\n\nSolution:", r"\frac{1}{2}"),
        ("[MATH_TASK] Problem:\nc\n\nSolution:", "(1,2)"),
    }
    said = capsys.readouterr().out
    assert "train.jsonl, 4 rows: 2 train, 2 without an answer (" in said
    assert "train.jsonl:2" in said and "train.jsonl:4" in said and "train.jsonl:1" not in said
    with pytest.raises(
        UsageError, match="500 of the validation problems of math are not in its training"
    ):
        data.load_problems("math", "validation", str(tmp_path))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (math_row("a", ""), "train.jsonl:1: \"solution\" must be a non-empty string, found ''"),
        (math_row("a", "s", answer=""), 'train.jsonl:1: "answer" must be a non-empty string'),
        (math_row("a", "s", answer=None), 'train.jsonl:1: "answer" must be a non-empty string'),
        ('{"solution": "s"}\n', 'train.jsonl:1: "problem" must be a non-empty string, found None'),
        (
            math_row("a", "s", unique_id="i") + math_row("b", "s", unique_id="i"),
            "train.jsonl:2: the id 'i' is also in",
        ),
    ],
)
def test_unusable_math_files_are_named(tmp_path, text, message):
    write(tmp_path, text)
    with pytest.raises(UsageError, match=re.escape(message)):
        data.load_problems("math", "train", str(tmp_path))


@needs_data
def test_math_split(tmp_path, capsys):
    splits = {name: data.load_problems("math", name, MATH) for name in data.SPLITS}
    assert [len(problems) for problems in splits.values()] == [11_498, 11_498, 500, 500]
    assert (
        "12000 rows: 11498 train, 500 validation, 2 without an answer (" in capsys.readouterr().out
    )
    train, validation, test = ({p.prompt for p in splits[s]} for s in data.SPLITS[1:])
    assert not train & validation and not train & test and not validation & test
    problem = splits["test"][0]
    assert problem.prompt.startswith("[MATH_TASK] Problem:\n")
    assert problem.prompt.endswith("\n\nSolution:")
    assert problem.solution[0] == "\n" == problem.solution[-1]
    assert grade_boxed(problem.solution, problem.answer) == 1
    # all 12,500 in one file, backwards, with a BOM and CRLF: MATH-500 is taken out again
    rows = read_jsonl(f"{MATH}/train.jsonl") + read_jsonl(f"{MATH}/test.jsonl")
    text = "".join(json.dumps(row, ensure_ascii=False) + "\r\n" for row in reversed(rows))
    write(tmp_path, b"\xef\xbb\xbf" + text.encode())
    for name in ("train", "validation"):
        again = data.load_problems("math", name, str(tmp_path))
        assert {(p.prompt, p.answer) for p in again} == {(p.prompt, p.answer) for p in splits[name]}
        assert [p.prompt for p in again] == [p.prompt for p in splits[name]]


@needs_data
def test_committed_splits_are_the_smallest_fingerprints():
    """So nobody has picked them by hand."""
    with open(f"{ROOT}/tasks/splits.json") as file:
        splits = json.load(file)
    for task, folder, field in (("gsm8k", GSM8K, "question"), ("math", MATH, "problem")):
        keys = [mathematics.fingerprint(row[field]) for row in read_jsonl(f"{folder}/train.jsonl")]
        once = sorted(key for key, times in Counter(keys).items() if times == 1)
        committed = splits[task]["validation"]
        assert committed == [key for key in once if key <= committed[-1]]
        test = [mathematics.fingerprint(row[field]) for row in read_jsonl(f"{folder}/test.jsonl")]
        assert splits[task]["test"] == sorted(test)
    assert [len(s["validation"]) for s in splits.values()] == [373, 500]


@needs_data
def test_your_own_problems_may_have_boxed_answers(tmp_path):
    row = {"prompt": "a", "answer": r"\frac{1}{2}"}
    (tmp_path / "train.jsonl").write_text(json.dumps(row) + "\n")
    args = ["--task", "jsonl", "--data-dir", str(tmp_path), "--grading-rule", "boxed"]
    args = tyro.cli(vineppo.Args, args=[*args, "--step-rule", "math"])
    assert data.find_task(args) == data.Task("math", "boxed")
    assert data.load(args, "train") == [data.Problem("a", r"\frac{1}{2}", None)]
    args.grading_rule = "auto"
    with pytest.raises(UsageError, match=r"frac\{1\}\{2\}' is not a plain number"):
        data.load(args, "train")


@needs_data
def test_what_would_mix_the_splits_is_refused(tmp_path):
    train, test = (read_jsonl(f"{MATH}/{name}.jsonl") for name in ("train", "test"))

    def refused(split, name, rows, message):
        folder = tmp_path / str(len(os.listdir(tmp_path)))
        folder.mkdir()
        write(folder, "".join(json.dumps(row) + "\n" for row in rows), f"{name}.jsonl")
        with pytest.raises(UsageError, match=re.escape(message)):
            data.load_problems("math", split, str(folder))

    # MATH-500 in another wording would not be taken out of the 12,500
    changed = [{**row, "problem": row["problem"].rstrip("?.")} for row in test]
    refused("train", "train", train + changed, "of the 500 test problems are recognized in it")
    refused("test", "test", train[:500], "not the test set of math: 500 of its 500 problems are mi")
    refused("test", "test", test[:100], "400 of its 500 problems are missing, 0 others are in it")
    empty = [row for row in train if not extract_boxed(row["solution"])]
    assert len(empty) == 2
    refused("train", "train", empty, "no usable problem for train")


# ---- the hub -------------------------------------------------------------------------------------

SHOW_SPLITS = """
import json, sys
from common.data import load_problems
task, *folder = sys.argv[1:]
splits = [load_problems(task, split, *folder) for split in ("train", "validation", "test")]
print(json.dumps(splits))
"""


def run_python(text, *arguments, cwd, **variables):
    return subprocess.run(
        [sys.executable, "-c", text, *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": ROOT, "HF_HOME": str(cwd), **variables},
        capture_output=True,
        text=True,
    )


def put_on_hub(folder, files):
    """`files` {(dataset, config, split): rows} as folders that `datasets` takes for those of the
    hub: it looks for a folder of that name first."""
    import datasets

    configs = {}
    for (name, config, split), rows in files.items():
        path = f"{config}/{split}.parquet"
        os.makedirs(folder / name / config, exist_ok=True)
        datasets.Dataset.from_list(rows).to_parquet(folder / name / path)
        configs.setdefault(name, {}).setdefault(config, []).append((split, path))
    for name, of_name in configs.items():
        lines = ["---", "configs:"]
        for config, splits in of_name.items():
            lines += [f"- config_name: {config}", "  data_files:"]
            lines += [f"  - split: {split}\n    path: {path}" for split, path in splits]
        (folder / name / "README.md").write_text("\n".join([*lines, "---", ""]))


@pytest.mark.slow
@needs_data
@pytest.mark.parametrize("task", ["gsm8k", pytest.param("math", marks=pytest.mark.soak)])
def test_the_hub_gives_the_same_splits(task, tmp_path):
    """The real code, `datasets` included, on the hub's own layout and another order of rows."""
    train, test = (read_jsonl(f"{DATA}/{task}/{name}.jsonl") for name in ("train", "test"))
    if task == "gsm8k":
        files = {("openai/gsm8k", "main", "train"): train[::-1]}
        files["openai/gsm8k", "main", "test"] = test
    else:
        files = {("HuggingFaceH4/MATH-500", "default", "test"): test}
        for row in train[::-1] + test:  # all 12,500 where they come from: "test/algebra/12.json"
            split, subject, _ = row["unique_id"].split("/")
            where = ("EleutherAI/hendrycks_math", subject, split)
            fields = ("problem", "solution")
            files.setdefault(where, []).append({name: row[name] for name in fields})
        assert len(files) == 15
    put_on_hub(tmp_path, files)
    hub = run_python(SHOW_SPLITS, task, cwd=tmp_path, HF_HUB_OFFLINE="1")
    assert hub.returncode == 0, hub.stderr[-3000:]
    hub = hub.stdout.splitlines()
    splits = ("train", "validation", "test")
    folder = [data.load_problems(task, split, f"{DATA}/{task}") for split in splits]
    assert hub[-1] == json.dumps(folder)
    if task == "math":
        said = "math from the hub, 12500 rows: 11498 train, 500 validation, 500 test, 2 without an"
        assert hub[0].startswith(said) and len(hub) == 3  # each file is read once


OWN = """
import json, sys
from common.data import load_split
from vineppo import Args
args = Args(task="jsonl", data_dir=sys.argv[1], grading_rule="boxed", prompt_field="problem",
            answer_field="solution")
print(json.dumps({split: load_split(args, split) for split in ("sft", "train", "test")}))
"""
COLUMNS = [{"problem": f"{i}+1?", "solution": f"It is $\\boxed{{{i + 1}}}$."} for i in range(4)]


@pytest.mark.slow
def test_your_own_from_the_hub_with_columns_of_other_names(tmp_path):
    put_on_hub(
        tmp_path,
        {("me/sums", "easy", "test"): COLUMNS[3:]} | {("me/sums", "easy", "train"): COLUMNS[:3]},
    )
    found = run_python(OWN, "hub:me/sums/easy", cwd=tmp_path, HF_HUB_OFFLINE="1")
    assert found.returncode == 0, found.stderr[-3000:]
    splits = json.loads(found.stdout.splitlines()[-1])
    assert splits["train"] == splits["sft"] and len(splits["train"]) == 3
    assert splits["test"] == [["3+1?", "4", COLUMNS[3]["solution"]]]
    missing = run_python(OWN, "hub:me/nothing", cwd=tmp_path, HF_HUB_OFFLINE="1")
    assert missing.returncode == 1 and len(missing.stderr.splitlines()) == 1, missing.stderr
    assert missing.stderr.startswith("error: --data-dir hub:me/nothing: not found (")


def test_parquet_and_lines_are_the_same_problems(tmp_path):
    import datasets

    datasets.disable_progress_bars()
    fields = ("problem", "solution", "solution")
    text = "".join(json.dumps(row) + "\n" for row in COLUMNS)
    (tmp_path / "lines").mkdir()
    write(tmp_path / "lines", text)
    (tmp_path / "parquet").mkdir()
    datasets.Dataset.from_list(COLUMNS).to_parquet(tmp_path / "parquet/train.parquet")
    folders = [str(tmp_path / name) for name in ("lines", "parquet")]
    lines, parquet = (data.load_problems("jsonl", "train", f, "boxed", fields) for f in folders)
    assert lines == parquet and lines[0] == ("0+1?", "1", COLUMNS[0]["solution"])
    with pytest.raises(UsageError, match=r'train.parquet:1: "prompt" must be a non-empty string'):
        data.load_problems("jsonl", "train", folders[1], "boxed")
    (tmp_path / "parquet/train.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(UsageError, match=r"train.parquet: not Parquet \("):
        data.load_problems("jsonl", "train", folders[1], "boxed", fields)


@pytest.mark.parametrize(
    ("rule", "text", "answer"),
    [
        ("####", "72", "72"),
        ("####", "6*12=72\n#### 72", "72"),
        ("boxed", "\\frac{1}{2}", "\\frac{1}{2}"),
        ("boxed", "So \\boxed{3}, no, \\boxed{\\frac{1}{2}}.", "\\frac{1}{2}"),
    ],
)
def test_an_answer_may_be_a_whole_solution(tmp_path, rule, text, answer):
    write(tmp_path, json.dumps({"prompt": "?", "answer": text}) + "\n")
    (problem,) = data.load_problems("jsonl", "train", str(tmp_path), rule)
    assert problem.answer == answer
    assert RULES[rule].grade(f"#### {answer} \\boxed{{{answer}}}", answer) == 1.0


def test_an_id_that_says_nothing_is_none(tmp_path):
    lines = [
        f'{{"id": {name}, "prompt": "{i}", "answer": "1"}}\n'
        for i, name in enumerate(['""', '""', "NaN", "NaN", "null", "null"])
    ]
    write(tmp_path, "".join(lines))
    assert len(data.load_problems("jsonl", "train", str(tmp_path))) == 6


@pytest.mark.slow
def test_without_a_network(tmp_path):
    for task in ("gsm8k", "math"):
        result = run_python(SHOW_SPLITS, task, cwd=tmp_path, HF_HUB_OFFLINE="1")
        assert result.returncode == 1 and len(result.stderr.splitlines()) == 1, result.stderr
        assert result.stderr.startswith(f"error: --task {task}: ")
        assert "could not be loaded from the hub" in result.stderr
        assert "run this once where there is a network, or give a folder with" in result.stderr


# ---- prompts -------------------------------------------------------------------------------------


def with_room(number: int) -> SimpleNamespace:
    return SimpleNamespace(max_model_len=number + 9, max_response_len=9, chat=False)


def test_prompts_that_are_too_long_are_dropped_or_refused(capsys):
    tokenizer = chain.make_tokenizer()
    problems = [data.Problem("1+2=?\n", "3", None), data.Problem("1+2+3=?\n", "6", None)]
    kept, ids = data.fit(with_room(6), problems, tokenizer)
    assert capsys.readouterr().out == "1 of 2 problems dropped: too many tokens\n"
    assert kept == problems[:1] and len(ids) == 1 and len(ids[0]) == 6
    kept, ids = data.fit(with_room(6), [*problems[::-1], *problems], tokenizer, 1)
    assert kept == problems[:1] and len(ids) == 1  # the first that fits, not the first if it fits
    with pytest.raises(UsageError, match="all 2 prompts have more than 5 tokens"):
        data.fit(with_room(5), problems, tokenizer)


def test_one_bos_where_the_tokenizer_adds_one_and_one_eos_behind_a_solution():
    vocab = {token: i for i, token in enumerate(["<bos>", "<eos>", "a", "b"])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="b"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", vocab["<bos>"])]
    )
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>")
    problem = data.Problem("a b", "1", " b a")
    assert data.fit(with_room(9), [problem], fast)[1] == [[0, 2, 3]]
    assert sft.encode_solutions([problem], fast, 9) == [([0, 2, 3], [3, 2, 1])]


@pytest.mark.parametrize("kind", ["byte", "sentencepiece"])
def test_a_solution_is_encoded_as_sampling_writes_it(kind):
    """Behind its prompt: without the space mark of a text that stands alone. What is learnt decodes
    to prompt and solution, and the prompt's ids are those that sampling starts from."""
    tokenizer = make_bpe(kind)
    problem = data.Problem("She has 4.\n", "7", "He has 3 apples.\n#### 7")
    ((prompt_ids, solution_ids),) = sft.encode_solutions([problem], tokenizer, 99)
    assert prompt_ids == tokenizer(problem.prompt)["input_ids"]
    assert [*prompt_ids, *solution_ids[:-1]] == (
        tokenizer(problem.prompt + problem.solution)["input_ids"]
    )
    alone = tokenizer(problem.solution)["input_ids"]
    assert (solution_ids[:-1] == alone) == (kind == "byte")
    assert solution_ids[-1] == tokenizer.eos_token_id
    text = tokenizer.decode([*prompt_ids, *solution_ids], skip_special_tokens=True)
    assert text == problem.prompt + problem.solution


@pytest.mark.parametrize("kind", ["byte", "sentencepiece"])
def test_a_solution_that_begins_inside_a_token_of_its_prompt(kind):
    """ "4." and a newline would be one token: the prompt has its "4." already, so the solution is
    encoded alone, without the space mark and without a second BOS."""
    tokenizer = make_bpe(kind)
    tokenizer.bos_token = "<eos>"
    tokenizer._tokenizer.post_processor = TemplateProcessing(
        single="<eos> $A", special_tokens=[("<eos>", tokenizer.bos_token_id)]
    )
    problem = data.Problem("She has 4.", "7", "\n#### 7\n\nHe")
    whole = tokenizer(problem.prompt + problem.solution)["input_ids"]
    ((prompt_ids, solution_ids),) = sft.encode_solutions([problem], tokenizer, 99)
    assert whole[: len(prompt_ids)] != prompt_ids == tokenizer(problem.prompt)["input_ids"]
    assert prompt_ids[0] == tokenizer.bos_token_id not in solution_ids[:-1]
    text = tokenizer.decode([*prompt_ids, *solution_ids], skip_special_tokens=True)
    assert text == problem.prompt + problem.solution


SPLIT_FILES = [("train", "validation"), ("train", "test"), ("validation", "test")]
SPLIT_FILES += [("sft", "validation"), ("sft", "test")]


@pytest.mark.parametrize(("one", "other"), SPLIT_FILES)
def test_a_problem_that_two_splits_have_is_named(one, other, tmp_path):
    """Whichever of the two is read; more spaces hide nothing."""
    for number, name in enumerate(("sft", "train", "validation", "test")):
        row = {"prompt": f"what is {number}?", "answer": "1"}
        write(tmp_path, json.dumps(row) + "\n", f"{name}.jsonl")
    for name in ("sft", "train", "validation", "test"):
        assert len(data.load_problems("jsonl", name, str(tmp_path))) == 1
    rows = [{"prompt": f"is {name} new?", "answer": "1"} for name in (one, other)]
    for name, row, spaces in zip((one, other), rows, (" ", "  \n"), strict=True):
        both = [row, {"prompt": f"the same{spaces}twice", "answer": "2"}]
        write(tmp_path, "".join(json.dumps(r) + "\n" for r in both), f"{name}.jsonl")
    for name, twin in ((one, other), (other, one)):
        with pytest.raises(
            UsageError, match=rf"{name}.jsonl:2: .*same.* {tmp_path}/{twin}.jsonl:2"
        ):
            data.load_problems("jsonl", name, str(tmp_path))


def test_sft_and_train_may_share_problems(tmp_path):
    for name in ("sft", "train"):
        write(tmp_path, json.dumps({"prompt": "a", "answer": "1"}), f"{name}.jsonl")
    for name in ("sft", "train"):
        assert data.load_problems("jsonl", name, str(tmp_path)) == [("a", "1", None)]


def test_added_tokens_count():
    """Rows of added tokens are not padding: EOS is often one of them."""
    tokenizer = chain.make_tokenizer()
    tokenizer.add_tokens(["<tool>"])
    assert tokenizer.vocab_size == 34 and engines.count_tokens(tokenizer) == 35


def test_the_answer_of_a_math_row_is_its_field_or_else_its_last_box():
    row = {"problem": "1+2?", "solution": r"so \boxed{2}, or \boxed{3}"}
    assert mathematics.parse("math", row)[1] == "3"
    assert mathematics.parse("math", row | {"answer": "4"})[1] == "4"
