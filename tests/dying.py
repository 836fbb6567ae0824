"""Work for processes that die, importable by name in a process that starts afresh."""

import os
import signal
import time
from pathlib import Path


def marked(job, report):
    """Die as the job says, ``times`` times in all, then return its name.

    A job is ``(name, folder, how, times)``; each attempt leaves a file in the folder.
    """
    name, folder, how, times = job
    report()
    attempt = len(list(Path(folder).glob(f"{name}-*"))) + 1
    Path(folder, f"{name}-{attempt}").write_text(str(os.getpid()))
    if attempt <= times:
        END[how]()
    return name


def _run_out_of_memory():
    raise MemoryError("cannot allocate 7 bytes")


def _go_wrong():
    raise ValueError("the work is wrong")


class Unpicklable(Exception):
    def __init__(self, first, second):
        super().__init__(f"{first} {second}")


def _go_wrong_unpicklably():
    raise Unpicklable("two", "parts")


END = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "exit": lambda: os._exit(7),
    "memory": _run_out_of_memory,
    "wrong": _go_wrong,
    "unpicklable": _go_wrong_unpicklably,
}


def endless(job, report):
    """Step for ever, having said in a file which process it is."""
    Path(job, f"pid-{os.getpid()}").write_text("")
    while True:
        time.sleep(0.01)
        report()
