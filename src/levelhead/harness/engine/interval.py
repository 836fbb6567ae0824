"""Where the time of a training goes: steps, and waiting for data."""

import time


class Interval:
    """Time since the last logged step, and how much of it was waiting for data."""

    def __init__(self):
        self._start = self._told = time.perf_counter()
        self._waited = self._waited_told = 0.0
        self._step = -1
        self._entered = 0.0

    def waiting(self) -> "Interval":
        """Time what the data takes.

        Returns:
            The context to wait in.
        """
        return self

    def __enter__(self) -> None:
        self._entered = time.perf_counter()

    def __exit__(self, *exception: object) -> None:
        waited = time.perf_counter() - self._entered
        self._waited += waited
        self._waited_told += waited

    def speed(self, step: int, batch_size: int) -> dict[str, float]:
        """Sum up since the last call.

        Args:
            step: That has just been done.
            batch_size: Samples of a step.

        Returns:
            ``samples_per_s``, and ``data_wait_frac`` in [0, 1].
        """
        now = time.perf_counter()
        passed = max(now - self._told, 1e-9)
        steps = 1 if self._step < 0 else step - self._step
        found = {
            "samples_per_s": batch_size * steps / passed,
            "data_wait_frac": self._waited_told / passed,
        }
        self._told, self._waited_told, self._step = now, 0.0, step
        return found

    def add_to(self, times: dict[str, float]) -> None:
        """Add what has passed since the last call.

        Args:
            times: ``seconds`` and ``waited_s``, changed.
        """
        now = time.perf_counter()
        times["seconds"] += now - self._start
        times["waited_s"] += self._waited
        self._start, self._waited = now, 0.0
