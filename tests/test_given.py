"""What is given to a run: the machine, the folder, the model, a chat, tracking (given/)."""

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

import sft
import vineppo
from common import RunError, UsageError, data, engines, ranks, run, sampling
from common.checkpoints import Checkpoints
from given import chat, folder, model, tracking, weights
from tasks import chain
from tests.architectures import ARCHITECTURES, FEW, Result, check, describe, make_model
from tests.conftest import ROOT, command, quiet_environment


@pytest.fixture(scope="module", autouse=True)
def one_process():
    ranks.set_up()


# ---- the machine ---------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variables", "message"),
    [
        (
            {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "29577"},
            "error: RANK is set, but not LOCAL_RANK: torchrun sets all of them; for one process, "
            "unset RANK",
        ),
        ({"SLURM_PROCID": "3"}, "error: SLURM_PROCID is 3: each of these processes would train al"),
        ({"OMPI_COMM_WORLD_RANK": "1"}, "error: OMPI_COMM_WORLD_RANK is 1: each of these process"),
    ],
)
def test_ranks_that_torchrun_has_not_started(variables, message):
    done = subprocess.run(
        [sys.executable, "-c", "from common import ranks; ranks.set_up()"],
        cwd=ROOT,
        env=quiet_environment() | variables,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1 and done.stderr.startswith(message), done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.slow
def test_one_process_chooses_no_port():
    """A port that is chosen first and bound later may be another process's by then."""
    code = "import os; from common import ranks; ranks.set_up(); import torch.distributed as dist\n"
    code += "store = dist.distributed_c10d._get_default_store()\n"
    code += "print('MASTER_PORT' in os.environ, 'TCP' in str(store.underlying_store))"
    said = subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, env=quiet_environment())
    assert said.decode() == "False False\n"


@pytest.mark.slow
def test_one_process_of_slurm_or_mpi_is_no_error():
    code = "from common import ranks; print(ranks.set_up()[:2])"
    alone = {"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "PMI_RANK": "0"}
    environment = quiet_environment() | alone
    said = subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, env=environment)
    assert said.decode() == "(0, 1)\n"


# ---- the folder ----------------------------------------------------------------------------------


def test_a_folder_belongs_to_one_process_while_it_lives(tmp_path):
    path = tmp_path / "a [b] c"
    code = "import sys; from given import folder; file = folder.claim(sys.argv[1], 'no')\n"
    code += "print('mine', flush=True); input()"
    other = subprocess.Popen(
        [sys.executable, "-c", code, str(path)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert other.stdout.readline() == "mine\n"
    for resume in ("no", "auto"):
        with pytest.raises(UsageError, match="another process runs in it"):
            run.Run("vineppo.py", vineppo.Args(output_dir=str(path), resume=resume))
    other.kill()
    other.wait()
    assert os.path.exists(path / "lock")  # what a kill leaves is in nobody's way
    assert run.Run("vineppo.py", vineppo.Args(output_dir=str(path))).lock


@pytest.mark.slow
def test_a_start_that_was_refused_leaves_no_folder(tmp_path):
    words = ["vineppo.py", "--data-dir", "nowhere", "--output-dir", str(tmp_path / "new")]
    done = subprocess.run(command(*words), cwd=ROOT, env=quiet_environment(), capture_output=True)
    assert done.returncode == 1 and not os.path.exists(tmp_path / "new")


def test_a_disk_without_symbolic_links_is_named(tmp_path, monkeypatch):
    folder.check_shared(str(tmp_path))

    def refuse(*_):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(os, "symlink", refuse)
    with pytest.raises(UsageError, match=r"has no symbolic links \(Operation not supported\); na"):
        folder.check_shared(str(tmp_path))
    assert os.listdir(tmp_path) == []


def test_other_weights_or_problems_are_not_those_of_the_run(tmp_path):
    for name in ("model", "data", "run"):
        (tmp_path / name).mkdir()
    weights_file, problems = tmp_path / "model/model.safetensors", tmp_path / "data/train.jsonl"
    weights_file.write_bytes(b"some"), problems.write_text("a\n")
    args = vineppo.Args(
        model=str(tmp_path / "model"), data_dir=str(tmp_path / "data"), resume="auto"
    )
    args = replace(args, output_dir=str(tmp_path / "run"))
    first = run.Run("vineppo.py", replace(args, resume="no"))
    assert first.settings["dtype"] == "float32"  # "auto" is another one on a GPU
    (tmp_path / "run/args.json").write_text(json.dumps(first.settings))
    (tmp_path / "model/README.md").write_text("no weights")
    (tmp_path / "data/run").mkdir()  # another run below it, and problems for evaluate.py
    (tmp_path / "data/run/metrics.jsonl").write_text("{}")
    (tmp_path / "data/test.jsonl").write_text("{}")
    (tmp_path / "model/run/hf").mkdir(parents=True)
    (tmp_path / "model/run/hf/model.safetensors").write_bytes(b"a checkpoint of it")
    run.Run("vineppo.py", args)
    weights_file.write_bytes(b"others")
    with pytest.raises(UsageError, match="settings that it began with: model_files was '"):
        run.Run("vineppo.py", args)
    weights_file.write_bytes(b"some")
    problems.write_text("b\n")
    with pytest.raises(UsageError, match="settings that it began with: data_files was '"):
        run.Run("vineppo.py", args)


def test_a_checkpoint_that_cannot_be_removed_ends_nothing(tmp_path, monkeypatch):
    """An NFS server keeps a file that somebody reads: its folder is not empty."""
    checkpoints = Checkpoints(str(tmp_path), {}, keep=1)
    for iteration in (1, 2):
        (tmp_path / f"checkpoints/iteration_{iteration:06d}/hf").mkdir(parents=True)
    remove = shutil.rmtree

    def refuse(path, ignore_errors=False, **_):
        if not ignore_errors:
            raise OSError(39, "Directory not empty")

    monkeypatch.setattr(shutil, "rmtree", refuse)
    checkpoints.tidy_up({})
    assert checkpoints.iterations() == [2] and os.path.exists(tmp_path / "checkpoints/removed")
    monkeypatch.setattr(shutil, "rmtree", remove)
    checkpoints.check_room({})
    assert not os.path.exists(tmp_path / "checkpoints/removed")


def test_a_home_folder_is_meant_by_its_sign(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert run.Run("vineppo.py", vineppo.Args(output_dir="~/run")).folder == f"{tmp_path}/run"


# ---- the model -----------------------------------------------------------------------------------


@pytest.mark.parametrize("model_type", ["granite", "cohere", "cohere2", "gemma2", "granitemoe"])
def test_logits_that_are_scaled_or_capped(model_type, tmp_path):
    """What every script trains on is what the model itself says."""
    make_model(model_type, str(tmp_path))
    args = vineppo.Args(model=str(tmp_path))
    loaded = engines.load_model(args, engines.load_tokenizer(args))
    ids, mask = torch.randint(1, 30, (1, 12)), torch.ones(1, 8)
    with torch.no_grad():
        own = loaded(ids).logits[0, 3:-1].log_softmax(-1).gather(1, ids[0, 4:, None])[:, 0]
        for script in (sft, vineppo):
            ours = script.compute_logprobs(loaded, ids, torch.tensor([4]), mask, 1.0)[0]
            torch.testing.assert_close(ours, own, atol=1e-5, rtol=0)
        head = engines.score(loaded, torch.randn(3, 64) * 9, torch.tensor([1, 2, 3]), 0.5)
    assert head.isfinite().all()


def test_logits_of_another_kind_are_refused():
    settings = {"vocab_size": 34, "hidden_size": 64, "intermediate_size": 64}
    settings |= {"num_hidden_layers": 1, "num_attention_heads": 2}
    config = AutoConfig.for_model("llama", **settings)
    made = AutoModelForCausalLM.from_config(config).eval()
    weights.check_head(made)
    own = made.forward

    def doubled(*arguments, **named):
        output = own(*arguments, **named)
        return type(output)(logits=output.logits * 2, hidden_states=output.hidden_states)

    made.forward = doubled
    with pytest.raises(UsageError, match="LlamaForCausalLM computes logits in a way that this"):
        weights.check_head(made)


def test_attention_that_is_capped_is_not_left_to_the_fused_kernel(tmp_path):
    make_model("gemma2", str(tmp_path))
    args = vineppo.Args(model=str(tmp_path))
    loaded = engines.load_model(args, engines.load_tokenizer(args))
    assert loaded.config._attn_implementation == "eager"


def test_sampling_settings_that_transformers_would_not_save(tmp_path):
    make_model("llama", str(tmp_path / "model"))
    path = tmp_path / "model/generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "temperature": 0.9}))
    with pytest.raises(ValueError, match="do_sample"):
        GenerationConfig.from_pretrained(tmp_path / "model").save_pretrained(tmp_path / "other")
    args = vineppo.Args(model=str(tmp_path / "model"))
    loaded = engines.load_model(args, engines.load_tokenizer(args))
    loaded.save_pretrained(tmp_path / "saved")
    assert GenerationConfig.from_pretrained(tmp_path / "saved").temperature == 0.9


def test_experts_get_the_names_that_files_have(tmp_path):
    make_model("qwen3_moe", str(tmp_path))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    named = dict(weights.named_weights(loaded, True))
    name = "model.layers.0.mlp.experts.down_proj"
    parts = weights.as_saved(loaded, name, named[name].detach())
    assert list(parts) == [f"model.layers.0.mlp.experts.{i}.down_proj.weight" for i in range(4)]
    for part, expert in zip(parts.values(), named[name], strict=True):
        assert torch.equal(part, expert)


def test_a_tied_head_has_a_name_where_vllm_has_a_head(tmp_path):
    make_model("gemma2", str(tmp_path))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert "lm_head.weight" in dict(weights.named_weights(loaded, True))
    assert "lm_head.weight" not in dict(weights.named_weights(loaded, False))


def test_ends_are_those_of_the_files_and_of_no_letter(tmp_path):
    make_model("llama", str(tmp_path))
    config = AutoConfig.from_pretrained(tmp_path)
    assert model.find_ends(str(tmp_path), config) == [1]
    os.remove(tmp_path / "generation_config.json")
    config.eos_token_id = 5  # as vLLM, which takes that of config.json then
    assert model.find_ends(str(tmp_path), config) == [5]


@pytest.mark.slow
def test_architectures():
    """Some are sampled and trained alike; the soak tries all of docs/models.md."""
    try_architectures(*FEW, "--short")


@pytest.mark.soak
def test_all_architectures_and_a_resume():
    try_architectures()


def try_architectures(*words):
    names = [word for word in words if word != "--short"] or list(ARCHITECTURES)
    done = subprocess.run(
        [sys.executable, "-m", "tests.architectures", *names, *words[-1:]],
        cwd=ROOT,
        env=quiet_environment(),
        capture_output=True,
        text=True,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    results = [Result(**json.loads(line)) for line in lines]
    assert [result.model_type for result in results] == names, done.stderr[-3000:]
    with open(f"{ROOT}/docs/models.md") as file:
        rows = without_gaps(file.read())
    for result in results:
        check(result, short="--short" in words)
        assert without_gaps(describe(result)) in rows


def without_gaps(text):
    """They are not the same on every machine."""
    return re.sub(r"\de-\d\d", "gap", text)


# ---- tokens, and a chat --------------------------------------------------------------------------

TEMPLATE = (
    "{% for one in messages %}<{{ one['role'][0] }}>{{ one['content'] }}<end>\n{% endfor %}"
    "{% if add_generation_prompt %}<a>{% if enable_thinking is false %}<t>{% endif %}{% endif %}"
)


def make_chat_tokenizer():
    tokenizer = chain.make_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<end>", "<u>", "<a>", "<t>"]})
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def test_a_prompt_is_a_message_and_the_template_s_end_is_learnt():
    tokenizer = make_chat_tokenizer()
    problem = data.Problem("2+3=?", "5", "\n2+3=5\n#### 5\n")
    (prompt,) = data.encode([problem], tokenizer, as_chat=True)
    assert tokenizer.decode(prompt) == "<u>2+3=?<end>\n<a><t>"
    assert tokenizer.decode(chat.find_end(tokenizer)) == "<end>"
    ((same, solution),) = sft.encode_solutions([problem], tokenizer, 99, as_chat=True)
    assert same == prompt and tokenizer.decode(solution) == "2+3=5\n#### 5<end>"
    _, prompts = data.fit(vineppo.Args(chat=True), [problem], tokenizer)
    assert prompts == [prompt]
    assert data.fit(vineppo.Args(), [problem], tokenizer)[1] == [tokenizer("2+3=?")["input_ids"]]


def test_an_answer_is_what_the_template_writes_behind_its_prompt():
    """Both of two special tokens after it are learnt. A template that writes a past prompt
    differently gives the solution alone."""
    tokenizer = make_chat_tokenizer()
    tokenizer.chat_template = TEMPLATE.replace("<end>", "<t><end>").replace(
        "<t>{% endif", "{% endif"
    )
    problem = data.Problem("2+3=?", "5", "5")
    ((prompt, solution),) = sft.encode_solutions([problem], tokenizer, 99, as_chat=True)
    assert tokenizer.decode(prompt) == "<u>2+3=?<t><end>\n<a>"
    assert tokenizer.decode(solution) == "5<t><end>"
    whole = [{"role": "user", "content": "2+3=?"}, {"role": "assistant", "content": "5"}]
    assert chat.apply(tokenizer, whole, False)[: len(prompt + solution)] == prompt + solution


def test_a_template_that_fails_is_one_line(tmp_path):
    tokenizer = make_chat_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('no assistant here') }}"
    with pytest.raises(UsageError, match=r"the chat template of m fails \(no assistant here\)"):
        chat.check(vineppo.Args(model="m", chat=True), tokenizer, None)


def test_a_template_that_ends_with_the_tokenizer_s_eos():
    tokenizer = make_chat_tokenizer()
    tokenizer.chat_template = TEMPLATE.replace("<end>", "<eos>")
    assert chat.find_end(tokenizer) == [tokenizer.eos_token_id]
    tokenizer.chat_template = "{% for one in messages %}{{ one['content'] }}{% endfor %}"
    assert chat.find_end(tokenizer) == [tokenizer.eos_token_id]


def test_an_eos_that_the_tokenizer_appends_is_left_out():
    from tokenizers.processors import TemplateProcessing

    tokenizer = chain.make_tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="$A <eos>", special_tokens=[("<eos>", tokenizer.eos_token_id)]
    )
    problem = data.Problem("2+3=?\n", "5", "2+3=5\n#### 5")
    plain = chain.make_tokenizer()
    assert data.encode([problem], tokenizer) == data.encode([problem], plain)
    assert sft.encode_solutions([problem], tokenizer, 99) == sft.encode_solutions(
        [problem], plain, 99
    )


def test_what_the_tokenizer_does_not_know(capsys):
    tokenizer = chain.make_tokenizer()
    data.encode([data.Problem("2+3=?", "5", None), data.Problem("日本?", "5", None)], tokenizer)
    said = "note: 1 of 2 prompts have characters that the tokenizer does not keep: '日本?'"
    assert said in capsys.readouterr().out

    class Deaf:
        eos_token_id, bos_token_id, eos_token, bos_token = 1, None, "<eos>", None

        def __call__(self, texts, **_):
            return {"input_ids": [[] for _ in texts] if isinstance(texts, list) else []}

    with pytest.raises(UsageError, match="becomes no token: the tokenizer knows none of its char"):
        data.encode([data.Problem("日本", "5", None)], Deaf())


def test_a_solution_that_ends_in_its_middle_is_refused():
    problem = data.Problem("2+3=?\n", "5", "2+3=5<eos>\n#### 5")
    with pytest.raises(UsageError, match=r"the solution '2\+3=5<eos>.* contains the EOS token"):
        sft.encode_solutions([problem], chain.make_tokenizer(), 99)


def test_responses_that_are_all_empty_say_so():
    empty = sampling.Sample([], [], True, True)
    with pytest.raises(RunError, match="all responses are empty: each begins with the text of --s"):
        sampling.describe([empty, empty])
    assert (
        sampling.describe([empty, sampling.Sample([1], [0.0], True, False)])["tokens/sample"] == 1
    )


# ---- tracking ------------------------------------------------------------------------------------


class Wandb:
    """Stands in for wandb, which is not installed: what the code calls."""

    def __init__(self, has_key):
        self.has_key, self.started = has_key, []

    def login(self, prompt):
        assert prompt is False
        return self.has_key

    def init(self, **settings):
        self.started.append(settings)


def test_folders_of_one_name_are_two_runs_and_a_resumed_one_is_one(tmp_path, monkeypatch):
    wandb = Wandb(True)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    for name in ("a/lr=1e-6,k=9", "b/lr=1e-6,k=9", "a/lr=1e-6,k=9"):
        os.makedirs(tmp_path / name, exist_ok=True)
        tracking.start(str(tmp_path / name), {})
    first, second, resumed = wandb.started
    assert first["id"].isalnum() and first["id"] != second["id"] and first["id"] == resumed["id"]
    assert {one["name"] for one in wandb.started} == {"lr=1e-6,k=9"}


def test_tracking_without_a_key_is_refused_at_once(monkeypatch):
    monkeypatch.setattr(tracking.importlib.util, "find_spec", lambda name: True)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setitem(sys.modules, "wandb", Wandb(True))
    tracking.check()
    monkeypatch.setitem(sys.modules, "wandb", Wandb(False))
    with pytest.raises(UsageError, match="not logged in to Weights & Biases"):
        tracking.check()
    monkeypatch.setitem(sys.modules, "wandb", object())  # an old one, say
    with pytest.raises(UsageError, match="--track: AttributeError"):
        tracking.check()
    monkeypatch.setenv("WANDB_MODE", "offline")
    tracking.check()
