"""Each mistake in flags or files gets one message that names it, before any engine starts: the table
in docs/errors.md, of which each row is made here. `python -m tests.test_errors` renews the page."""
# ruff: noqa: E501 (a case is a line)

import dataclasses
import json
import os
import sys
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM

import restem
import vineppo
from common import UsageError, engines, flags, ranks
from given import folder as given_folder
from tasks import chain
from tests.conftest import ROOT, call, call_many

PAGE = os.path.join(ROOT, "docs/errors.md")
PROBLEM = '{"prompt": "1+1=?", "answer": "2"}\n'
SOLVED = PROBLEM.replace("}", ', "solution": "#### 2"}')

# folder/train.jsonl (and validation.jsonl, if the second is not None)
FILES: dict[str, tuple[bytes | str | None, str | None]] = {
    "good": (PROBLEM, PROBLEM.replace("1+1", "1+2")),
    "common": (PROBLEM, PROBLEM),
    "solved": (SOLVED, SOLVED.replace("1+1", "1+2")),
    "nothing": (None, None),
    "empty": ("", None),
    "half": (PROBLEM + '{"prompt": \n', None),
    "list": (PROBLEM + "[1, 2]\n", None),
    "deep": (PROBLEM + "[" * 100_000 + "\n", None),
    "no_answer": ('{"prompt": "1+1=?"}\n', None),
    "number": ('{"prompt": "1+1=?", "answer": 2}\n', None),
    "words": ('{"prompt": "1+1=?", "answer": "two"}\n', None),
    "latin": (b'{"prompt": "caf\xe9", "answer": "2"}\n', None),
    "surrogate": ('{"prompt": "\\ud800", "answer": "2"}\n', None),
    "twice": ((PROBLEM[:-2] + ', "id": "a"}\n') * 2, None),
    "no_validation": (PROBLEM, None),
    "long": (PROBLEM.replace("=?", "+1" * 99 + "=?"), PROBLEM),
    "bos": (PROBLEM.replace("1+1", "####1+1"), PROBLEM),
    "boxes": (PROBLEM.replace('"2"', '"so #### 2"'), PROBLEM),
    "eos": (PROBLEM.replace("1+1", "1+1<eos>"), PROBLEM),
    "no_marker": ('{"question": "1+1?", "answer": "two"}\n', None),
}


def make_models(folder) -> None:
    """Tiny checkpoints, each wrong in one way, or in none ("model")."""
    tokenizer = chain.make_tokenizer()
    config = chain.make_model_config(tokenizer)
    model = AutoModelForCausalLM.from_config(config)

    def make(name: str, weights: bool = True):
        if weights:
            model.save_pretrained(folder / name)
        config.save_pretrained(folder / name)
        chain.make_tokenizer().save_pretrained(folder / name)
        return folder / name

    def change(path, **values) -> None:
        path.write_text(json.dumps({**json.loads(path.read_text()), **values}))

    make("model")
    (folder / "no_checkpoint").mkdir()
    make("no_weights", weights=False)
    (make("cut_off") / "model.safetensors").write_bytes(b"\x10\x27" + bytes(100))
    torch.save(model.state_dict(), make("pickles", weights=False) / "pytorch_model.bin")
    of_its_own = make("code")
    (of_its_own / "evil.py").write_text(f"open({str(folder / 'EXECUTED')!r}, 'w')\n")
    classes = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    change(of_its_own / "config.json", model_type="evil", auto_map=classes)
    change(make("few_rows", weights=False) / "config.json", vocab_size=20)
    no_eos = chain.make_tokenizer()
    no_eos.eos_token = None
    no_eos.save_pretrained(make("no_eos"))
    bos = chain.make_tokenizer()
    bos.bos_token = "####"
    bos._tokenizer.post_processor = TemplateProcessing(
        single="#### $A", special_tokens=[("####", bos.bos_token_id)]
    )
    bos.save_pretrained(make("adds_bos"))
    chat = chain.make_tokenizer()
    chat.chat_template = "{% for one in messages %}{{ one['content'] }}<pad>{% endfor %}"
    chat.save_pretrained(make("chat"))
    make("model[1]")
    change(make("quantised") / "config.json", quantization_config={"quant_method": "gptq"})
    change(make("bloom") / "config.json", model_type="bloom", architectures=["BloomForCausalLM"])
    change(make("padless") / "generation_config.json", pad_token_id=-1)
    change(make("other_eos") / "generation_config.json", eos_token_id=[1, 7])
    grown = chain.make_tokenizer()
    grown.add_special_tokens({"eos_token": "<|im_end|>"})
    grown.save_pretrained(make("grown"))
    weights = model.state_dict()
    parts = {name.replace("model.", "_orig_mod."): x for name, x in weights.items()}
    save_file(parts, make("renamed") / "model.safetensors", metadata={"format": "pt"})
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, make("incomplete") / "model.safetensors", metadata={"format": "pt"})


JSONL = ["--task", "jsonl", "--data-dir"]
# (what is given, the words of a command, its message). A word "FOLDER/x" is x of the folder above.
CASES = [
    ("**Flags**", [], ""),
    ("an unknown task", ["--task", "nope"], "--task nope: no such task; choose from chain, gsm8k, math, jsonl"),
    ("minibatches that do not fit an iteration", ["--minibatch-size", "24"], "--minibatch-size 24: must divide the 64 responses of an iteration (--num-prompts 8 x --group-size 8)"),
    ("a smoothing above 1", ["-m", "experiments.vineppo_cheap", "--smoothing", "2"], "--smoothing 2.0: must be between 0 and 1"),
    ("an engine over more ranks than there are", ["--tensor-parallel-size", "2", "--model", "FOLDER/model"], "--tensor-parallel-size 2: must divide the number of ranks, which is 1"),
    ("ZeRO 3 for RestEM", ["restem.py", "--zero-stage", "3"], "--zero-stage 3: RestEM reloads whole weights, which stage 3 splits; take 0 or 2"),
    ("no rollouts", ["--k", "0"], "--k 0: must be at least 1"),
    ("a cap below 0", ["-m", "experiments.vineppo_cheap", "--max-steps-valued", "-1"], "--max-steps-valued -1: must be 0 or more"),
    ("no prompts", ["--num-prompts", "0"], "--num-prompts 0: must be at least 1"),
    ("no iterations", ["--num-iterations", "0"], "--num-iterations 0: must be at least 1"),
    ("a learning rate of 0", ["--learning-rate", "0"], "--learning-rate 0.0: must be above 0 and finite"),
    ("a clip of 0", ["--clip-coef", "0"], "--clip-coef 0.0: must be above 0 and finite"),
    ("a temperature of 0", ["--eval-temperature", "0"], "--eval-temperature 0.0: must be above 0 and at most 2"),
    ("a top-p above 1", ["--top-p", "2"], "--top-p 2.0: must be above 0 and at most 1"),
    ("a warm-up above 1", ["--warmup-fraction", "3"], "--warmup-fraction 3.0: must be between 0 and 1"),
    ("a negative KL coefficient", ["--kl-coef", "-1"], "--kl-coef -1.0: must be 0 or more"),
    ("responses as long as the context", ["--max-response-len", "128"], "--max-response-len 128 leaves no room for a prompt: it must be less than --max-model-len 128"),
    ("more memory than there is", ["--gpu-memory-utilization", "1.5"], "--gpu-memory-utilization 1.5: must be above 0 and at most 1"),
    ("a seed that is too large", ["--seed", "9223372036854775808"], "--seed 9223372036854775808: must be 0 or more, and below 2**63"),
    ("a special token as the stop string", ["--stop", "<eos>", "--model", "FOLDER/model"], "--stop <eos>: is a special token, which decoding drops; add it to eos_token_id in generation_config.json"),
    ("--chat for a model without a chat template", ["--chat", "--model", "FOLDER/model"], "--chat: FOLDER/model has no chat template; leave out --chat"),
    ("--chat where answers would not end", ["--chat", "--model", "FOLDER/chat"], "--chat: the chat template of FOLDER/chat ends an answer with '<pad>', which is not an EOS: add it to eos_token_id in its generation_config.json, else responses will not end"),
    ("Weights & Biases that is not installed", ["--track"], "--track needs Weights & Biases: .venv/bin/pip install wandb"),
    ("a group of one", ["grpo.py", "--group-size", "1", "--minibatch-size", "8"], "--group-size must be at least 2, to compare responses"),
    ("a group of one", ["rloo.py", "--group-size", "1", "--minibatch-size", "8"], "--group-size must be at least 2, to compare responses"),
    ("a discount above 1", ["ppo.py", "--gamma", "1.5"], "--gamma 1.5: must be between 0 and 1"),
    ("a negative lambda", ["ppo.py", "--gae-lambda", "-0.1"], "--gae-lambda -0.1: must be between 0 and 1"),
    ("a critic that does not learn", ["ppo.py", "--critic-learning-rate", "0"], "--critic-learning-rate 0.0: must be above 0 and finite"),
    ("RestEM without evaluations", ["restem.py", "--eval-every", "0"], "--eval-every must be at least 1, to select weights"),
    ("a group too small for a pair", ["dpo_pos.py", "--group-size", "1"], "--group-size must be at least 2, for a pair"),
    ("a beta of 0", ["dpo_pos.py", "--beta", "0"], "--beta 0.0: must be above 0 and finite"),
    ("a negative penalty", ["dpo_pos.py", "--penalty", "-1"], "--penalty -1.0: must be 0 or more"),
    ("no pairs", ["dpo_pos.py", "--max-pairs", "0"], "--max-pairs 0: must be at least 1"),
    ("a learning rate of 0", ["sft.py", "--learning-rate", "0"], "--learning-rate 0.0: must be above 0 and finite"),
    ("no problems in a batch", ["sft.py", "--batch-size", "0"], "--batch-size 0: must be at least 1"),
    ("no epochs", ["sft.py", "--num-epochs", "0"], "--num-epochs 0.0: must be above 0 and finite"),
    ("the embedded model for another task", ["sft.py", *JSONL, "FOLDER/good"], "--model embedded is for --task chain only: for jsonl, name another --model"),
    ("no responses", ["evaluate.py", "--model", "FOLDER/model", "--rounds", "0"], "--rounds 0: must be at least 1"),
    ("-1 for all problems", ["evaluate.py", "--model", "FOLDER/model", "--num-problems", "-1"], "--num-problems -1: must be 0 or more"),
    ("**Files**", [], ""),
    ("your own task without a folder", ["--task", "jsonl"], "--task jsonl needs --data-dir, the folder with your problems"),
    ("a folder that is not there", [*JSONL, "FOLDER/nowhere"], "--data-dir FOLDER/nowhere: no such folder (for a data set on the hub: hub:OWNER/NAME)"),
    ("a grading rule for a task that has its own", ["--grading-rule", "boxed"], "--step-rule and --grading-rule are for --task jsonl only; chain has its own rules"),
    ("a file that is not there", [*JSONL, "FOLDER/nothing"], "FOLDER/nothing/train.jsonl: no such file"),
    ("no validation problems", [*JSONL, "FOLDER/no_validation"], "FOLDER/no_validation/validation.jsonl: no such file (--eval-every 0 skips evaluation)"),
    ("an empty file", [*JSONL, "FOLDER/empty"], "FOLDER/empty/train.jsonl: is empty; it needs one JSON object per line"),
    ("a line that was cut off", [*JSONL, "FOLDER/half"], "FOLDER/half/train.jsonl:2: not JSON (Expecting value: line 2 column 1 (char 12))"),
    ("brackets that never close", [*JSONL, "FOLDER/deep"], "FOLDER/deep/train.jsonl:2: not JSON (maximum recursion depth exceeded while decoding a JSON array from a unicode string)"),
    ("a line that is not an object", [*JSONL, "FOLDER/list"], "FOLDER/list/train.jsonl:2: a line must be a JSON object, found list"),
    ("a line without an answer", [*JSONL, "FOLDER/no_answer"], 'FOLDER/no_answer/train.jsonl:1: "answer" must be a non-empty string, found None'),
    ("an answer that is not a string", [*JSONL, "FOLDER/number"], 'FOLDER/number/train.jsonl:1: "answer" must be a non-empty string, found 2'),
    ("an answer that is not a number", [*JSONL, "FOLDER/words"], "FOLDER/words/train.jsonl:1: the answer 'two' is not a plain number, so no response could match it"),
    ("an answer for another grading rule", [*JSONL, "FOLDER/boxes", "--grading-rule", "boxed"], "FOLDER/boxes/train.jsonl:1: the answer 'so #### 2' has ####: leave out --grading-rule boxed"),
    ("a prompt with an end token in it", [*JSONL, "FOLDER/eos", "--model", "FOLDER/model"], "the prompt '1+1<eos>=?' contains the EOS token: remove it from the data"),
    ("GSM8K without its marker", ["--task", "gsm8k", "--data-dir", "FOLDER/no_marker"], "FOLDER/no_marker/train.jsonl:1: the answer has no '####' before its number"),
    ("a file that is not UTF-8", [*JSONL, "FOLDER/latin"], "FOLDER/latin/train.jsonl: not UTF-8 ('utf-8' codec can't decode byte 0xe9 in position 15: invalid continuation byte)"),
    ("half a character", [*JSONL, "FOLDER/surrogate"], 'FOLDER/surrogate/train.jsonl:1: "prompt" has half of a character (a lone surrogate): remove it'),
    ("an id twice", [*JSONL, "FOLDER/twice"], "FOLDER/twice/train.jsonl:2: the id 'a' is also in FOLDER/twice/train.jsonl:1"),
    ("a problem to train on and to evaluate on", [*JSONL, "FOLDER/common"], "FOLDER/common/train.jsonl:1: the problem '1+1=?' is also in FOLDER/common/validation.jsonl:1: remove it from one of them, else scores would be of problems that were trained on"),
    ("prompts that leave no room for a response", [*JSONL, "FOLDER/long", "--model", "FOLDER/model"], "all 1 prompts have more than 48 tokens (--max-model-len minus --max-response-len): raise the first or lower the second"),
    ("a second BOS", [*JSONL, "FOLDER/bos", "--model", "FOLDER/adds_bos"], "the prompt '####1+1=?' begins with '####', and the tokenizer adds another: remove it from the data"),
    ("no solutions to learn from", ["sft.py", *JSONL, "FOLDER/good", "--model", "FOLDER/model"], "no solution (--solution-field) to '1+1=?'"),
    ("a row that cannot be graded", ["-m", "common.grading", "FOLDER/good/train.jsonl"], "FOLDER/good/train.jsonl:1: not a row to grade: KeyError('response')"),
    ("**Models**", [], ""),
    ("a folder that is not there", ["--model", "FOLDER/nowhere"], "--model FOLDER/nowhere: no such folder"),
    ("a folder without a model", ["--model", "FOLDER/no_checkpoint"], "--model FOLDER/no_checkpoint: not a checkpoint (..."),
    ("a model without weights", ["--model", "FOLDER/no_weights"], "--model FOLDER/no_weights: not a checkpoint (no model.safetensors in it)"),
    ("weights that were cut off", ["--model", "FOLDER/cut_off"], "--model FOLDER/cut_off: not a checkpoint (..."),
    ("weights that are pickles", ["--model", "FOLDER/pickles"], "--model FOLDER/pickles: has no model.safetensors, only pickles, which can run any code; if you trust them, --trust-remote-code"),
    ("a model with code of its own", ["--model", "FOLDER/code"], "--model FOLDER/code: has code of its own; read it, then allow it by --trust-remote-code"),
    ("a tokenizer without EOS", ["--model", "FOLDER/no_eos"], "--model FOLDER/no_eos: its tokenizer has no end token (EOS)"),
    ("another model's tokenizer", ["--model", "FOLDER/few_rows"], "--model FOLDER/few_rows: its tokenizer has 34 tokens, its embeddings 20 rows: it is another model's tokenizer"),
    ("more tokens than the model supports", ["--max-model-len", "256", "--model", "FOLDER/model"], "--max-model-len 256: FOLDER/model supports at most 128 tokens"),
    ("a model that is not there", ["evaluate.py", "--model", "FOLDER/nowhere"], "--model FOLDER/nowhere: no such folder"),
    ("a path that vLLM reads as a pattern", ["--model", "FOLDER/model[1]"], "--model FOLDER/model[1]: vLLM reads no path with *, ? or [: rename it"),
    ("quantised weights", ["--model", "FOLDER/quantised"], "--model FOLDER/quantised: its weights are quantised, so they cannot be trained; use the model before quantisation"),
    ("an architecture that vLLM cannot update", ["--model", "FOLDER/bloom"], "--model FOLDER/bloom: vLLM cannot update the weights of its output head; docs/models.md lists what works"),
    ("generation settings that cannot be saved", ["--model", "FOLDER/padless"], "--model FOLDER/padless: transformers cannot save its generation settings (..."),
    ("an EOS that is an ordinary token", ["--model", "FOLDER/other_eos"], "--model FOLDER/other_eos: its configuration names token 7 as EOS, which is ..."),
    ("a new EOS without a row in the embeddings", ["--model", "FOLDER/grown"], "--model FOLDER/grown: its tokenizer's EOS or BOS is token 34, its embeddings have 34 rows: call resize_token_embeddings, then save it"),
    ("weights that are missing", ["--model", "FOLDER/incomplete"], "--model FOLDER/incomplete: weights are missing: 1 (model.layers.1.mlp.up_proj.weight); the download or copy is not complete"),
    ("weights under other names", ["sft.py", *JSONL, "FOLDER/solved", "--model", "FOLDER/renamed"], "--model FOLDER/renamed: weights are missing: 29 (..."),
    ("**Runs**", [], ""),
    ("an address as a folder", ["--output-dir", "s3://bucket/run"], "--output-dir s3://bucket/run: is an address; name a folder of this machine"),
    ("a folder that cannot be made", ["--output-dir", "FOLDER/good/train.jsonl/run"], "--output-dir FOLDER/good/train.jsonl/run: cannot be written to (Not a directory)"),
    ("a folder in place of a result's file", ["evaluate.py", "--model", "FOLDER/model", "--output", "FOLDER/good"], "--output FOLDER/good: is a folder; name a file in it"),
    ("a folder that holds a run", ["--output-dir", "FOLDER/run"], "FOLDER/run already holds a run: continue it with --resume auto, or name another --output-dir"),
    ("a resume without a run", ["--resume", "auto", "--output-dir", "FOLDER/nowhere"], "--resume auto: no run to resume in FOLDER/nowhere"),
    ("a resume with other settings", ["--resume", "auto", "--output-dir", "FOLDER/run"], "--resume auto: FOLDER/run needs the settings that it began with: kl_coef was 0.001, is 0.0001"),
    ("a resume by another script", ["grpo.py", "--resume", "auto", "--output-dir", "FOLDER/run"], "--resume auto: FOLDER/run needs the settings that it began with: ..."),
    ("a folder that is no run's", ["-m", "analysis.curves", "FOLDER/nowhere"], "FOLDER/nowhere/metrics.jsonl: no such file; FOLDER/nowhere is not the folder of a run"),
    ("a folder that is no run's", ["-m", "analysis.values", "--run", "FOLDER/nowhere"], "FOLDER/nowhere/args.json: no such file; FOLDER/nowhere is not the folder of a run"),
    ("a folder that is no run's", ["-m", "analysis.credit", "--run", "FOLDER/nowhere"], "FOLDER/nowhere/args.json: no such file; FOLDER/nowhere is not the folder of a run"),
    ("nothing to measure", ["-m", "analysis.values"], "give either --run or --model"),
]  # fmt: skip
ROWS = [case for case in CASES if case[1]]


def script_of(words: list[str]) -> list[str]:
    return words if words[0] == "-m" or words[0].endswith(".py") else ["vineppo.py", *words]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What each command of ROWS did."""
    folder = tmp_path_factory.mktemp("errors")
    for name, texts in FILES.items():
        (folder / name).mkdir()
        for file, text in zip(("train", "validation"), texts, strict=True):
            if text is not None:
                text = text if isinstance(text, bytes) else text.encode()
                (folder / name / f"{file}.jsonl").write_bytes(text)
    make_models(folder)
    settings = {**vars(vineppo.Args()), "script": "vineppo", "world_size": 1, "kl_coef": 0.001}
    settings = {k: v for k, v in settings.items() if k not in flags.FREE}
    ranks.set_up()
    files = given_folder.fingerprint(settings["model"], given_folder.MODEL_FILES)
    settings |= {"dtype": "float32", "model_files": files, "data_files": ""}
    (folder / "run").mkdir()
    (folder / "run" / "args.json").write_text(json.dumps(settings))
    commands = []
    for _, words, _ in ROWS:
        words = [word.replace("FOLDER", str(folder)) for word in script_of(words)]
        if words[0].endswith(".py") and words[0] != "evaluate.py" and "--output-dir" not in words:
            words += ["--output-dir", f"{folder}/new"]
        commands.append(words)
    return folder, call_many(commands)


@pytest.mark.parametrize("number", range(len(ROWS)), ids=[f"{w[-1]} {g}" for g, w, _ in ROWS])
def test_one_message_and_no_traceback(results, number):
    folder, outcomes = results
    status, _, errors = outcomes[number]
    lines = errors.replace("[rank0]: ", "").strip().splitlines()
    assert status == 1 and len(lines) == 1, errors  # so no traceback, and no engine's log
    message = ROWS[number][2].replace("FOLDER", str(folder))
    if "..." in message:
        assert lines[0].startswith("error: " + message.split("...")[0])
    else:
        assert lines[0] == "error: " + message
    assert not os.path.exists(folder / "new")
    assert not os.path.exists(folder / "EXECUTED")


def make_table() -> str:
    """Messages of a section that differ only before their first colon have one row together. What
    is wrong with a flag its message says, so those rows have no second cell."""
    rows = ["| message | what is wrong |", "|---|---|"]
    together: dict[tuple[str, str], dict[str, str]] = {}  # section, ending -> {message: given}
    for given, words, message in CASES:
        if not words:
            section = given
        start, colon, rest = message.partition(": ")
        together.setdefault((section, colon + rest or start), {})[message] = given
    for (section, ending), givens in together.items():
        if "" in givens:
            rows.append(f"| {section} |")
            continue
        cells = [f"`{next(iter(givens))}`"]
        if len(givens) > 1:
            starts = [f"`{message.removesuffix(ending)}`" for message in givens]
            cells = [f"{', '.join(starts)}{ending[:2]}`{ending[2:]}`"]
        if section != "**Flags**":
            cells.append("; ".join(dict.fromkeys(givens.values())))
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(rows) + "\n"


def with_table(text: str) -> str:
    before, rest = text.split("<!-- errors -->\n")
    return f"{before}<!-- errors -->\n{make_table()}<!-- end -->{rest.split('<!-- end -->')[1]}"


def test_the_page_has_these_rows():
    with open(PAGE) as file:
        text = file.read()
    assert with_table(text) == text, "`python -m tests.test_errors` renews it"


# ---- what is right, though it may look wrong -----------------------------------------------------


def args_for(model, trust: bool = False) -> SimpleNamespace:
    return SimpleNamespace(
        model=str(model), max_model_len=128, trust_remote_code=trust, dtype="float32", chat=False
    )


def test_pickles_and_code_are_read_where_they_are_trusted(results):
    folder, _ = results
    pickles, model = args_for(folder / "pickles", trust=True), args_for(folder / "model")
    tokenizer = engines.load_tokenizer(pickles)
    loaded, whole = (engines.load_model(args, tokenizer) for args in (pickles, model))
    assert loaded.state_dict().keys() == whole.state_dict().keys()
    with pytest.raises(OSError, match=r"model\.safetensors"):
        engines.load_model(args_for(folder / "pickles"), tokenizer)
    with pytest.raises(UsageError):  # it has no such classes
        engines.load_tokenizer(args_for(folder / "code", trust=True))
    assert os.path.exists(folder / "EXECUTED")
    os.remove(folder / "EXECUTED")


def test_a_chat_template_is_not_used_and_that_is_said(results, capsys):
    engines.load_tokenizer(args_for(results[0] / "chat"))
    assert "has a chat template; --chat would use it" in capsys.readouterr().out


def test_missing_sft_checkpoint_names_the_command(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        UsageError, match=r"--model runs/sft/hf: no such folder; `python sft\.py` makes"
    ):
        engines.load_tokenizer(args_for("runs/sft/hf"))


def test_help_has_all_flags_in_groups_the_script_s_own_first(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["vineppo.py", "--help"])
    with pytest.raises(SystemExit):
        flags.parse(vineppo.Args)
    shown = capsys.readouterr().out
    titles = ["script options", "training options", "model options", "sampler options"]
    places = [shown.index(title) for title in [*titles, "run options"]]
    assert places == sorted(places)
    for field in dataclasses.fields(vineppo.Args):
        assert f"--{field.name.replace('_', '-')}" in shown, field.name
    assert shown.index("--k INT") < places[1] < shown.index("--seed INT")
    assert "VinePPO: PPO with measured values" in shown and "rollouts per state" in shown


def test_own_and_inherited_flags_land_in_the_arguments(monkeypatch, capsys):
    words = ["restem.py", "--eval-every", "7", "--seed", "5", "--track", "--group-size", "3"]
    monkeypatch.setattr(sys, "argv", words)
    args = flags.parse(restem.Args)
    assert args == restem.Args(eval_every=7, seed=5, track=True, group_size=3)
    monkeypatch.setattr(sys, "argv", [*words, "--grup-size", "3"])
    with pytest.raises(SystemExit):
        flags.parse(restem.Args)
    assert "Unrecognized options: --grup-size" in capsys.readouterr().err


@pytest.mark.slow
def test_ranks_say_it_once():
    result = call("vineppo.py", "--minibatch-size", "24", ranks=2, fails=True)
    assert result.stderr.count("error: --minibatch-size 24: must divide") == 1
    assert 'vineppo.py", line' not in result.stderr


if __name__ == "__main__":
    with open(PAGE) as file:
        page = with_table(file.read())
    with open(PAGE, "w") as file:
        file.write(page)
