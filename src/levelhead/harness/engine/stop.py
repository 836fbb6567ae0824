"""Ctrl-C and a scheduler's SIGTERM: a wish to stop, heard at the end of the step."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType


class Stopped(Exception):
    """The training was asked to stop; what it had done is saved.

    Args:
        step: Steps done.
        folder: Of the training.
        is_saved: Whether a checkpoint of that step was written.
    """

    def __init__(self, step: int, folder: Path, is_saved: bool):
        super().__init__(f"stopped after step {step} in {folder}")
        self.step, self.folder, self.is_saved = step, folder, is_saved


class StopRequest:
    """Whether somebody asked to stop."""

    def __init__(self):
        self.is_made = False

    def _make(self, number: int, frame: FrameType | None) -> None:
        if self.is_made and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.is_made = True


@contextmanager
def listening() -> Iterator[StopRequest]:
    """Turn the first SIGINT or SIGTERM into a request; a second SIGINT interrupts at once.

    Yields:
        The request. Outside the main thread nothing is heard.
    """
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, request._make) for number in numbers}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
