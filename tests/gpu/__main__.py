"""`make gpu-check`: run this first on a machine with a GPU. Without one it prints one line."""

import os
import shutil
import subprocess
import sys


def main() -> None:
    if (
        not shutil.which("nvidia-smi")
        or subprocess.run("nvidia-smi", capture_output=True).returncode
    ):
        print("gpu-check: no GPU here (nvidia-smi finds none), so there is nothing to check")
        return
    words = ["-m", "pytest", "-q", "-s", "-m", "gpu", "tests/gpu/check.py", *sys.argv[1:]]
    os.execv(sys.executable, [sys.executable, *words])


if __name__ == "__main__":
    main()
