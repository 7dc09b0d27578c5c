"""Tiny random models of many architectures: are they trained and sampled alike, or refused?

    python -m tests.architectures                  all of them; makes docs/models.md
    python -m tests.architectures granite --short  without resuming; prints JSON lines

Each learns to answer by sft.py (whose loss must be that of the saved model by itself), then does
two iterations of vineppo.py and, resumed from the first, does the second once more. They run in
forks of one process that has imported the engines.
"""

import json
import math
import os
import random
import shutil
import sys
import tempfile
from typing import NamedTuple

# One thread: a fork of a process with others could inherit a lock that nobody opens.
os.environ |= {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "TORCH_COMPILE_DISABLE": "1"}
os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
os.environ |= {"DS_LOG_LEVEL": "error", "TRANSFORMERS_VERBOSITY": "error"}

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from given.model import REFUSED
from tests.conftest import ROOT, read_jsonl

SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32}
SIZES |= {"max_position_embeddings": 128, "initializer_range": 0.1}
OLD_SIZES = {"n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": 128}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
LLAMA3_ROPE = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0}
LLAMA3_ROPE |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 64}

ARCHITECTURES = {  # model_type: settings beside SIZES
    "llama": {"rope_parameters": LLAMA3_ROPE},
    "qwen2": {},
    "qwen3": {},
    "mistral": {},
    "gemma": {},
    "gemma2": {"query_pre_attn_scalar": 32, "final_logit_softcapping": 10.0},
    "gemma3_text": {"query_pre_attn_scalar": 32},
    "phi": {},
    "phi3": {},
    "gpt2": OLD_SIZES,
    "gpt_neox": {},
    "gptj": {**OLD_SIZES, "rotary_dim": 16},
    "opt": {"ffn_dim": 128, "word_embed_proj_dim": 64},
    "stablelm": {},
    "falcon": {"head_dim": None},
    "glm": {},
    "glm4": {},
    "olmo": {},
    "olmo2": {},
    "olmo3": {},
    "smollm3": {},
    "starcoder2": {},
    "granite": {"logits_scaling": 2.0},
    "cohere": {"logit_scale": 0.5},
    "cohere2": {"logit_scale": 0.5},
    "ernie4_5": {},
    "exaone4": {},
    "nemotron": {},
    "seed_oss": {},
    "helium": {},
    "hunyuan_v1_dense": {},
    "arcee": {},
    "mixtral": LOCAL_EXPERTS,
    "qwen2_moe": {**EXPERTS, "shared_expert_intermediate_size": 64},
    "qwen3_moe": EXPERTS,
    "olmoe": EXPERTS,
    "granitemoe": {**LOCAL_EXPERTS, "logits_scaling": 2.0},
    "bloom": {"n_layer": 2, "n_head": 2},
    "gpt_bigcode": OLD_SIZES,
    "gpt_oss": LOCAL_EXPERTS,
    "mpt": {},
}
FEW = ("qwen3_moe",)  # experts


class Result(NamedTuple):
    model_type: str
    name: str  # of the class in transformers
    loss: float  # by sft.py, on the validation problems
    own_loss: float  # of the saved model, by itself
    gap: float  # the largest of vineppo.py's iterations
    reward: float
    grad_norm: float
    resumed: bool  # to the same weights, bit for bit
    error: str


def make_data(folder: str, size: int) -> None:
    """Problems with random answers, 1 or 2: a model that has learnt the form of an answer is right
    in half of its samples."""
    draw = random.Random(0)
    os.makedirs(folder)
    for split, first, number in (("train", 0, size), ("validation", size, 20)):
        with open(f"{folder}/{split}.jsonl", "w") as file:
            for i in range(first, first + number):
                answer = draw.randint(1, 2)
                row = {"prompt": f"{i}=?\n", "answer": str(answer)}
                row["solution"] = f"{answer}+0={answer}\n#### {answer}"
                file.write(json.dumps(row) + "\n")


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level tokenizer, like most: for some model types transformers uses a class that
    supports no other kind, whatever the files say."""
    names = ["<pad>", "<eos>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>")


def make_model(model_type: str, folder: str) -> str:
    """Saves a checkpoint with random weights; returns the name of its class."""
    from transformers import AutoConfig, AutoModelForCausalLM

    tokenizer = make_tokenizer()
    settings = {**SIZES, **ARCHITECTURES[model_type], "vocab_size": len(tokenizer)}
    settings = {name: value for name, value in settings.items() if value is not None}
    settings |= {"eos_token_id": 1, "bos_token_id": None, "pad_token_id": 0}
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **settings))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return type(model).__name__


def in_a_fork(function, log: str) -> str:
    """Runs it in a fork; returns the last line of its output, "" if it succeeds."""
    child = os.fork()
    if child == 0:
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, 1)
        os.dup2(file, 2)
        status = 1
        try:
            function()
            status = 0
        except BaseException:
            sys.excepthook(*sys.exc_info())
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    _, status = os.waitpid(child, 0)
    with open(log, errors="replace") as file:
        said = file.read().strip().splitlines() or ["no word"]
    return "" if status == 0 else said[-1]


def train_first(model: str, data_dir: str, folder: str) -> None:
    import sft

    sft.main(
        sft.Args(
            model=model,
            task="jsonl",
            data_dir=data_dir,
            num_epochs=1,
            batch_size=32,
            eval_every=150,
            save_every=150,
            output_dir=folder,
        )
    )


def train(model: str, data_dir: str, folder: str, resume: str = "no") -> None:
    import vineppo

    vineppo.main(
        vineppo.Args(
            model=model,
            task="jsonl",
            data_dir=data_dir,
            num_prompts=4,
            group_size=4,
            minibatch_size=8,
            k=3,
            num_iterations=2,
            save_every=1,
            eval_every=0,
            temperature=1.0,
            learning_rate=1e-3,
            max_response_len=24,
            output_dir=folder,
            resume=resume,
        )
    )


@torch.no_grad()
def find_loss(folder: str, data_dir: str) -> float:
    """sft.py's on the validation problems: here by the model's own logits, one text at a time."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    if getattr(model.config, "attn_logit_softcapping", None):
        model.set_attn_implementation("eager")
    losses = []
    for row in read_jsonl(f"{data_dir}/validation.jsonl"):
        prompt, solution = tokenizer(row["prompt"])["input_ids"], row["solution"]
        ids = tokenizer(row["prompt"] + solution)["input_ids"] + [tokenizer.eos_token_id]
        logprobs = model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
        taken = logprobs[range(len(ids) - 1), ids[1:]]
        losses.append(-taken[len(prompt) - 1 :].mean().item())
    return sum(losses) / len(losses)


def try_one(model_type: str, short: bool) -> Result:
    folder = tempfile.mkdtemp()
    try:
        return try_in(folder, model_type, short)
    finally:
        shutil.rmtree(folder)


def try_in(folder: str, model_type: str, short: bool) -> Result:
    data_dir, log = f"{folder}/data", f"{folder}/log"
    make_data(data_dir, 2400 if short else 4800)
    name, nothing = make_model(model_type, f"{folder}/model"), math.nan
    error = in_a_fork(lambda: train_first(f"{folder}/model", data_dir, f"{folder}/sft"), log)
    if error:
        return Result(model_type, name, *[nothing] * 5, False, error)
    loss = read_jsonl(f"{folder}/sft/metrics.jsonl")[-1]["eval/loss"]
    own_loss = find_loss(f"{folder}/sft/hf", data_dir)
    run = f"{folder}/run"
    error = in_a_fork(lambda: train(f"{folder}/sft/hf", data_dir, run), log)
    if error:
        return Result(model_type, name, loss, own_loss, *[nothing] * 3, False, error)
    lines = read_jsonl(f"{run}/metrics.jsonl")
    resumed = False
    if not short:
        weights = f"{run}/checkpoints/iteration_000002/hf/model.safetensors"
        with open(weights, "rb") as file:
            whole = file.read()
        shutil.rmtree(f"{run}/checkpoints/iteration_000002")
        error = in_a_fork(lambda: train(f"{folder}/sft/hf", data_dir, run, "auto"), log)
        if not error:
            with open(weights, "rb") as file:
                resumed = file.read() == whole
    gap = max(line["policy/sampler_gap"] for line in lines)
    reward = lines[0]["rollout/reward"]
    grad_norm = lines[0]["policy/grad_norm"]
    return Result(model_type, name, loss, own_loss, gap, reward, grad_norm, resumed, error)


def check(result: Result, short: bool = False) -> None:
    """Asserts that it is trained and sampled alike; or refused, where it must be."""
    if result.model_type in REFUSED:
        assert REFUSED[result.model_type] in result.error, result
        return
    assert not result.error, result
    assert abs(result.loss - result.own_loss) < 1e-4 and result.loss < 1.0, result
    assert result.gap < 1e-4 and 0 < result.reward < 1 and result.grad_norm > 0, result
    assert result.resumed or short, result


def describe(result: Result) -> str:
    refused = REFUSED.get(result.model_type)
    said = f"refused: {refused}" if refused else f"{result.gap:.0e}"
    return f"| `{result.model_type}` | {result.name} | {said} |"


def main() -> None:
    short = "--short" in sys.argv
    names = [name for name in sys.argv[1:] if name != "--short"]
    import sft  # noqa: F401
    import vineppo  # noqa: F401  (all of the code as it is now)

    for module in ("deepspeed", "vllm", "vllm.v1.worker.cpu_worker", "torch.utils.tensorboard"):
        __import__(module)
    torch.set_num_threads(1)
    rows, failed = [], []
    for name in names or ARCHITECTURES:
        result = try_one(name, short)
        print(json.dumps(result._asdict()), flush=True)
        try:
            check(result, short)
        except AssertionError as error:
            failed.append(name)
            print(f"WRONG: {error}", flush=True)
        if not names:
            rows.append(describe(result))
    if failed:
        sys.exit(f"not as they should be: {', '.join(failed)}")
    if not names:
        with open(f"{ROOT}/docs/models.md") as file:
            head, _, _ = file.read().partition("| `")
        with open(f"{ROOT}/docs/models.md", "w") as file:
            file.write(head + "\n".join(rows) + "\n")


if __name__ == "__main__":
    main()
