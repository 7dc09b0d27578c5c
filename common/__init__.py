"""What the algorithm scripts share that is not an algorithm, and how their errors look."""

import os
import signal
import sys
import time
import traceback


class UsageError(ValueError):
    """Something that the user gave cannot be used: the message names it and says what to do."""


class RunError(RuntimeError):
    """A run that cannot go on: the message says why, what is safe, and what to do."""


def require(condition: object, message: str) -> None:
    if not condition:
        raise UsageError(message)


def show_error(kind, error, trace) -> None:
    """A UsageError or RunError is its message, once however many ranks raise it; behind the
    traceback of what caused it, if something did."""
    if not issubclass(kind, UsageError | RunError):
        sys.__excepthook__(kind, error, trace)
        return
    if error.__cause__:
        traceback.print_exception(error.__cause__)
    elif os.environ.get("RANK", "0") != "0":
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(5)  # if rank 0 fails too, torchrun ends this one before it repeats the message
    print(f"error: {error}", file=sys.stderr, flush=True)


sys.excepthook = show_error
