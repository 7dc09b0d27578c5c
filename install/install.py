"""Makes .venv with what this machine needs (`make install`).

It runs on Python 3.6 and later with nothing installed, so that an old Python gets a message.
"""

import os
import platform
import shutil
import subprocess
import sys
import sysconfig

HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
VENV = os.path.join(HERE, ".venv")


def stop(message):
    sys.exit("install: " + message)


def check_driver(version):
    """Checks the GPU's driver. PyTorch's packages are for CUDA 13, which needs a driver of its
    generation. With an older one PyTorch gives no error: it just sees no GPU."""
    number = version.split(".")[0]
    if number.isdigit() and int(number) < 580 and not os.environ.get("ANY_DRIVER"):
        stop(
            f"the GPU's driver is {version}, PyTorch's CUDA 13 needs 580 or newer: update it, or "
            "hide the GPU with CUDA_VISIBLE_DEVICES= to install for the CPU, or set ANY_DRIVER=1 "
            "if NVIDIA's compatibility package is installed"
        )


def check_machine(has_gpu):
    version = "{}.{}".format(*sys.version_info[:2])
    if not (3, 11) <= sys.version_info[:2] <= (3, 14):
        names = ["python3." + str(minor) for minor in (14, 13, 12, 11)]
        found = [name for name in names if shutil.which(name)]
        hint = "make PYTHON=" + found[0] + " ..." if found else "install one of " + ", ".join(names)
        stop("Python " + version + " does not work, the engines need 3.11 to 3.14: " + hint)
    system, machine = platform.system(), platform.machine()
    if system != "Linux" or machine not in ("x86_64", "aarch64"):
        stop(
            f"vLLM has packages for Linux on x86_64 and aarch64; this is {system} on {machine}: "
            "use a Linux machine, a virtual machine or, on Windows, WSL 2"
        )
    libc, libc_version = platform.libc_ver()
    if libc != "glibc" or tuple(map(int, libc_version.split("."))) < (2, 28):
        stop(f"vLLM needs glibc 2.28 or newer, this system has {libc or 'another'} {libc_version}")
    if has_gpu and not shutil.which(os.environ.get("CC", "cc")) and not shutil.which("gcc"):
        stop("no C compiler, with which Triton builds modules for vLLM's kernels: install gcc")
    if has_gpu and not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")):
        stop("no headers of this Python, for Triton's modules (on Debian: apt install python3-dev)")
    needed = 16 if has_gpu else 5
    free = shutil.disk_usage(HERE).free / 2**30
    if free < needed:
        stop(f"{free:.1f} GiB free in {HERE}, but about {needed} are needed: make room")
    try:
        import ensurepip  # noqa: F401
    except ImportError:
        stop("this Python cannot make virtual environments (on Debian: apt install python3-venv)")


def run(*command, quiet=False):
    output = subprocess.DEVNULL if quiet else None
    return subprocess.call(command, cwd=HERE, stdout=output, stderr=output)


def ask_driver():
    """Version of the GPU's driver; "" if there is no GPU, or if it is hidden."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1") or not shutil.which(query[0]):
        return ""
    found = subprocess.run(query, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    words = found.stdout.decode().split()
    return words[0] if found.returncode == 0 and words else ""


def main():
    driver = ask_driver()
    has_gpu = bool(driver)
    if has_gpu:
        check_driver(driver)
    check_machine(has_gpu)
    import tomllib

    with open(os.path.join(HERE, "pyproject.toml"), "rb") as file:
        extras = tomllib.load(file)["project"]["optional-dependencies"]

    print(
        "install: Python {}, for {}".format(platform.python_version(), "GPU" if has_gpu else "CPU")
    )
    if run(sys.executable, "-m", "venv", VENV) != 0:
        stop("python -m venv failed, see above")
    python = os.path.join(VENV, "bin", "python")
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    index = []
    if not has_gpu:
        # PyTorch's CPU build is not on PyPI. If pip's configuration names a source, it is used.
        torch = next(one for one in extras["cpu"] if one.startswith("torch=="))
        if run(*pip, "--dry-run", "--no-deps", torch, quiet=True) != 0:
            url = os.environ.get("TORCH_CPU_INDEX") or "https://download.pytorch.org/whl/cpu"
            print(f"install: pip does not find {torch}, so it comes from {url}")
            index = ["--extra-index-url", url]
    extra = "gpu" if has_gpu else "cpu"
    if run(*pip, *index, "--editable", f".[{extra},dev]") != 0:
        stop("pip failed, see above; `make install` tries again")
    with open(os.path.join(VENV, "installed"), "w"):
        pass


if __name__ == "__main__":
    main()
