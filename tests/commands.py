"""Many short commands: each is a script run as users run it, in a process of its own, forked from
one that has imported what takes seconds. Reads JSON [[script, flag, ...], ...], writes [[exit
status, stdout, stderr], ...]. Run by the tests."""

import atexit
import json
import os
import runpy
import sys
import tempfile

import torch
import tyro
from transformers import AutoConfig, AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerFast

from common import data, flags, run, sampling
from tasks import chain

IMPORTED = (torch, tyro, AutoConfig, AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerFast)
IMPORTED += (data, flags, run, sampling)


def in_a_child(arguments: list[str], output: int, errors: int) -> None:
    os.dup2(output, 1)
    os.dup2(errors, 2)
    sys.argv, status = arguments, 0
    try:
        if arguments[0] == "-m":
            sys.argv = arguments[1:]
            sys.modules.pop(sys.argv[0], None)  # it becomes __main__
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        else:
            sys.path[0] = os.path.dirname(os.path.abspath(arguments[0]))
            runpy.run_path(arguments[0], run_name="__main__")
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else 1
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        status = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def main() -> None:
    results = []
    chain.make_splits()  # takes a second
    for arguments in json.load(sys.stdin):
        with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
            child = os.fork()
            if child == 0:
                in_a_child(arguments, output.fileno(), errors.fileno())
            _, status = os.waitpid(child, 0)
            texts = []
            for file in (output, errors):
                file.seek(0)
                texts.append(file.read())
            results.append([os.waitstatus_to_exitcode(status), *texts])
    print(json.dumps(results))


if __name__ == "__main__":
    main()
