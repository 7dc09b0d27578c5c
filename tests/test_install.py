"""install/install.py on unsupported machines. (The installation itself: test_soak.py.)"""

import subprocess
import sys

import pytest

from tests.conftest import ROOT


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("sys.version_info", "(3, 10, 1)", "Python 3.10 does not work, the engines need 3.11 to"),
        (
            "platform.system",
            "lambda: 'Darwin'",
            "vLLM has packages for Linux on x86_64 and aarch64",
        ),
        ("platform.libc_ver", "lambda: ('glibc', '2.27')", "vLLM needs glibc 2.28 or newer"),
        ("shutil.disk_usage", "lambda path: type('usage', (), {'free': 2**30})", "1.0 GiB free in"),
    ],
)
def test_machines_that_will_not_do(name, value, message):
    code = "import sys, platform, shutil; from install import install\n"
    code += f"{name} = {value}; install.main()"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 1 and result.stderr.startswith("install: " + message)
    assert len(result.stderr.strip().splitlines()) == 1


def test_a_gpu_needs_a_compiler():
    code = "import shutil; from install import install; shutil.which = lambda name: None\n"
    code += "install.check_machine(has_gpu=False); install.check_machine(has_gpu=True)"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert result.stderr.startswith("install: no C compiler, with which Triton builds")
