"""The internals of the engines that the code relies on (docs/engines.md) exist as described."""

import importlib.metadata
import os
import re
import sysconfig
import tomllib
from pathlib import Path

import pytest

from tests.conftest import ROOT

PAGE = Path(ROOT, "docs/engines.md").read_text()
ROWS = re.findall(r"^\|[^|]+\| `(\S+)` \| `([^`]+)` \|[^|]+\|$", PAGE, re.MULTILINE)
PACKAGES = {"vLLM": "vllm", "DeepSpeed": "deepspeed", "PyTorch": "torch"}


def test_the_versions_are_those_that_were_read():
    """A pin that was changed: read the rows of its engine again, then change the page."""
    read = dict(re.findall(r"(\w+) (\d+\.\d+\.\d+)", PAGE.split("Read with:")[1].split("\n\n")[0]))
    with open(os.path.join(ROOT, "pyproject.toml"), "rb") as file:
        project = tomllib.load(file)["project"]
    extras = project["optional-dependencies"]
    pins = [*project["dependencies"], *extras["gpu"], *extras["cpu"]]
    for name, version in read.items():
        package = PACKAGES.get(name, name)
        pinned = {one.partition("==")[2].partition("+")[0] for one in pins if f"{package}==" in one}
        assert pinned == {version}, name
    assert len(read) == 4


@pytest.mark.parametrize(("file", "name"), ROWS)
def test_each_thing_is_where_it_was(file, name):
    assert name in Path(sysconfig.get_path("purelib"), file).read_text()


def test_every_row_is_read():
    assert len(ROWS) == PAGE.count("\n| ") - 1 > 20
    assert {file.split("/")[0] for file, _ in ROWS} == {
        "vllm",
        "deepspeed",
        "torch",
        "transformers",
    }
    assert importlib.metadata.version("deepspeed") in PAGE
