"""docs/fork.md, done as it says, in a copy of the project."""

import os
import re
import shlex
import subprocess
import sys

from tests.conftest import ROOT, copy_of_the_project, quiet_environment, read_jsonl


def test_the_page_works(sft_model, tmp_path):
    copy_of_the_project(tmp_path)
    os.makedirs(tmp_path / "runs/sft")
    os.symlink(sft_model, tmp_path / "runs/sft/hf")

    def do(words, text=None):
        result = subprocess.run(
            words, cwd=tmp_path, env=quiet_environment(), input=text, capture_output=True, text=True
        )
        assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]

    with open(f"{ROOT}/docs/fork.md") as file:
        blocks = re.findall(r"^```(\w+)\n(.*?)^```$", file.read(), re.MULTILINE | re.DOTALL)
    assert [kind for kind, _ in blocks] == ["bash", "diff", "diff", "python", "bash"]
    for kind, text in blocks:
        if kind == "diff":
            do(["git", "apply", "--unidiff-zero", "-"], text)
        elif kind == "python":
            do([sys.executable, "-"], text)
        else:
            do(shlex.split(text.replace(".venv/bin/python", sys.executable)))
    lines = read_jsonl(tmp_path / "runs/batch_mean/metrics.jsonl")
    assert [line["iteration"] for line in lines] == [1, 2]
    for line in lines:
        assert 0.3 < line["rollout/reward"] < 0.9 and line["policy/grad_norm"] > 0
