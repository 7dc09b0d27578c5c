"""What the algorithm scripts share that is not an algorithm, and how their errors look."""

import os
import sys
import time


class UsageError(ValueError):
    """Something that the user gave cannot be used: the message names it and says what to do."""


def require(condition: object, message: str) -> None:
    if not condition:
        raise UsageError(message)


def show_error(kind, error, traceback) -> None:
    """A UsageError is its message and nothing else, once however many ranks raise it."""
    if not issubclass(kind, UsageError):
        sys.__excepthook__(kind, error, traceback)
        return
    if os.environ.get("RANK", "0") != "0":
        time.sleep(5)  # if rank 0 fails too, torchrun ends this one before it repeats the message
    print(f"error: {error}", file=sys.stderr, flush=True)


sys.excepthook = show_error
