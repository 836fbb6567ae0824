"""Work in processes that may die: a job is tried again, and one that never finishes is said so.

Each process has a pipe of its own and shares no lock with anybody, so that killing one at any
moment stops nobody else. The parent hands out one job at a time. Where the system can, processes
are copies of one that has imported everything once and has run nothing yet: of a server, or of the
program itself at its very start.
"""

import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any

RETRIES = 2  # a job is begun at most three times
REPORT_SECONDS = 0.2  # a process says how far it is, and hears whether to stop, this often
STOP_SECONDS = 10.0  # then it is killed

Report = Callable[[], None]
"""Called by the work after each step; what it raises stops the work."""
Work = Callable[[Any, Report], Any]
"""Takes a job and a report; importable by name, as the processes start afresh."""
OnSteps = Callable[[int], None]


class Stopped(Exception):
    """The parent wants no more, or is gone."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """How the attempts at one job ended.

    Attributes:
        job: The job.
        value: What the work returned; None where no attempt came to its end.
        deaths: Why each attempt before it ended early, in words.
        start_s: Seconds that the process took to start, where this was its first job; else 0.
    """

    job: Any
    value: Any = None
    deaths: tuple[str, ...] = ()
    start_s: float = 0.0


def run_here(
    jobs: Sequence[Any], work: Work, on_steps: OnSteps, retries: int = RETRIES
) -> Iterator[Result]:
    """Do jobs one after the other in this process: only lack of memory is survived.

    Args:
        jobs: What to do.
        work: How.
        on_steps: Told of each step.
        retries: How often a job that ran out of memory is begun again.

    Yields:
        One result a job, in order.
    """
    for job in jobs:
        deaths: list[str] = []
        while len(deaths) <= retries:
            num_steps = 0

            def report() -> None:
                nonlocal num_steps
                num_steps += 1
                on_steps(1)

            try:
                value = work(job, report)
            except MemoryError as error:
                on_steps(-num_steps)
                deaths.append(_out_of_memory(error))
                continue
            yield Result(job=job, value=value, deaths=tuple(deaths))
            break
        else:
            yield Result(job=job, deaths=tuple(deaths))


def run_in_processes(
    jobs: Sequence[Any], work: Work, processes: int, on_steps: OnSteps, retries: int = RETRIES
) -> Iterator[Result]:
    """Do jobs side by side; a process that dies is replaced and its job put at the end.

    Args:
        jobs: What to do; picklable.
        work: How; importable by name.
        processes: How many at a time.
        on_steps: Told how many more steps have been done, a few times a second; steps that died
            with their process are taken back (a negative number).
        retries: How often a job whose process died is begun again.

    Yields:
        One result a job, in the order of ending.

    Raises:
        RuntimeError: Processes die before they can take a job, more often than ``retries``.
        Exception: What the work raised, other than ``MemoryError``.
    """
    with Crew(work) as crew:
        yield from crew.do(jobs, processes, on_steps, retries)


class Crew:
    """Processes for one kind of work that wait between the calls; a context that ends them.

    Args:
        work: What they do; importable by name.
    """

    def __init__(self, work: Work):
        self.work = work
        self.workers: list[_Worker] = []

    def __enter__(self) -> "Crew":
        return self

    def __exit__(self, *_: object) -> None:
        self.dismiss()

    def copy_program(self, processes: int) -> None:
        """Start processes as copies of this one: nothing is imported a second time.

        Only a process that has imported and done nothing else may be copied, so this is for the
        first lines of a program. Where copies are no good (outside Linux, beside other threads)
        nothing happens, and ``do`` starts what it needs.

        Args:
            processes: How many.
        """
        if sys.platform == "linux" and threading.active_count() == 1:
            for _ in range(processes):
                others = [worker.connection for worker in self.workers]
                self.workers.append(_start_copy(self.work, others))

    def do(
        self, jobs: Sequence[Any], processes: int, on_steps: OnSteps, retries: int = RETRIES
    ) -> Iterator[Result]:
        """Do jobs side by side, as ``run_in_processes`` says.

        Args:
            jobs: What to do; picklable.
            processes: How many at a time, at least as many as there are already.
            on_steps: Told how many more steps have been done.
            retries: How often a job whose process died is begun again.

        Yields:
            One result a job, in the order of ending.
        """
        shift = _Shift(self, jobs, processes, on_steps, retries)
        try:
            for _ in jobs:
                yield shift.next_result()
        finally:
            if any(worker.attempts is not None for worker in self.workers):
                self.dismiss()

    def dismiss(self) -> None:
        """End every process: idle ones at once, others at their next step, the rest by force."""
        for worker in self.workers:
            worker.connection.close()
        deadline = time.monotonic() + STOP_SECONDS
        for worker in self.workers:
            worker.process.join(max(0.0, deadline - time.monotonic()))
            if worker.process.is_alive():
                worker.process.kill()
                worker.process.join()
        self.workers.clear()


@dataclass
class _Attempts:
    job: Any
    deaths: list[str] = field(default_factory=list)


@dataclass(eq=False)
class _Worker:
    process: Any
    connection: Connection
    started: float = field(default_factory=time.perf_counter)
    start_s: float | None = None  # None: not ready yet
    attempts: _Attempts | None = None
    num_steps: int = 0

    def begin_to_wait(self) -> None:
        """Count what is left of the start from now on: only that has to be waited for."""
        self.started = time.perf_counter()
        self.start_s = None if self.start_s is None else 0.0

    def give(self, attempts: _Attempts) -> None:
        """Begin a job; a process that has just died is found out when it is read from."""
        self.attempts, self.num_steps = attempts, 0
        with suppress(OSError):
            self.connection.send(attempts.job)

    def receive(self) -> tuple[str, Any]:
        """Take one message; the end of the pipe is the message of a death."""
        try:
            return self.connection.recv()
        except (EOFError, OSError):
            self.process.join()
            return "died", _cause(self.process.exitcode)


class _Shift:
    """One call's jobs, and the processes that do them."""

    def __init__(
        self, crew: Crew, jobs: Sequence[Any], size: int, on_steps: OnSteps, retries: int
    ):
        self.work, self.workers = crew.work, crew.workers
        self.size, self.on_steps, self.retries = size, on_steps, retries
        self.waiting = deque(_Attempts(job) for job in jobs)
        self.failed_starts: list[str] = []
        for worker in self.workers:
            worker.begin_to_wait()

    def next_result(self) -> Result:
        while True:
            self._staff()
            for connection in wait([worker.connection for worker in self.workers]):
                worker = next(w for w in self.workers if w.connection is connection)
                result = self._hear(worker, *worker.receive())
                if result is not None:
                    return result

    def _staff(self) -> None:
        """Give idle processes what waits, and start as many as there is still work for."""
        for worker in self.workers:
            if self.waiting and worker.start_s is not None and worker.attempts is None:
                worker.give(self.waiting.popleft())
        unready = sum(worker.start_s is None for worker in self.workers)
        wanted = min(self.size - len(self.workers), len(self.waiting) - unready)
        self.workers += [_start(self.work) for _ in range(wanted)]

    def _hear(self, worker: _Worker, what: str, content: Any) -> Result | None:
        match what:
            case "ready":
                worker.start_s = time.perf_counter() - worker.started
                self.failed_starts.clear()
            case "steps":
                worker.num_steps += content
                self.on_steps(content)
            case "done":
                return self._done(worker, content)
            case "died":
                return self._died(worker, content)
            case _:
                error, remote = content
                raise error from RuntimeError(f"in a worker process:\n{remote}")
        return None

    def _done(self, worker: _Worker, value: Any) -> Result:
        attempts, start_s = worker.attempts, worker.start_s
        assert attempts is not None
        assert start_s is not None
        worker.attempts, worker.start_s = None, 0.0
        deaths = tuple(attempts.deaths)
        return Result(job=attempts.job, value=value, deaths=deaths, start_s=start_s)

    def _died(self, worker: _Worker, cause: str) -> Result | None:
        self.workers.remove(worker)
        worker.connection.close()
        attempts = worker.attempts
        if attempts is None:
            self._failed_start(worker, cause)
            return None
        self.on_steps(-worker.num_steps)
        attempts.deaths.append(cause)
        if len(attempts.deaths) > self.retries:
            return Result(job=attempts.job, deaths=tuple(attempts.deaths))
        self.waiting.append(attempts)
        return None

    def _failed_start(self, worker: _Worker, cause: str) -> None:
        if worker.start_s is not None:
            return  # it had started, and held no job
        self.failed_starts.append(cause)
        if len(self.failed_starts) > self.retries:
            raise RuntimeError(
                f"no worker process can start: {'; '.join(self.failed_starts)}; what is finished "
                "is kept: the same command goes on, --workers 1 starts none"
            )


def _start(work: Work) -> _Worker:
    # Never a copy of this process: a torch that has computed may deadlock in its threads.
    servable = "forkserver" in multiprocessing.get_all_start_methods()
    context: Any = multiprocessing.get_context("forkserver" if servable else "spawn")
    context.set_forkserver_preload([__name__, work.__module__])
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, work))
    with _interrupts_ignored():  # the child inherits it
        process.start()
    theirs.close()
    return _Worker(process, ours)


def _start_copy(work: Work, others: Sequence[Connection]) -> _Worker:
    context: Any = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve_copy, args=(theirs, work, (ours, *others)))
    with _interrupts_ignored():
        process.start()
    theirs.close()
    return _Worker(process, ours)


def _serve_copy(connection: Connection, work: Work, copied: Sequence[Connection]) -> None:
    """Live as a worker process, without the ends of pipes that are the parent's alone."""
    for other in copied:
        other.close()
    _serve(connection, work)


def _serve(connection: Connection, work: Work) -> None:
    """Live as a worker process: take jobs until the pipe ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides; a server resets it
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with suppress(EOFError, OSError, Stopped, KeyboardInterrupt):
        connection.send(("ready", None))
        while True:
            job = connection.recv()
            report = _Reporter(connection)
            message = _attempt(job, work, report)
            report.send()
            connection.send(message)
            if message[0] == "died":
                return  # with it goes whatever memory is left behind


def _attempt(job: Any, work: Work, report: Report) -> tuple[str, Any]:
    try:
        return "done", work(job, report)
    except Stopped:
        raise
    except MemoryError as error:
        return "died", _out_of_memory(error)
    except Exception as error:
        return "raised", (_picklable(error), traceback.format_exc())


class _Reporter:
    """Counts the steps of a job, and tells the parent a few times a second."""

    def __init__(self, connection: Connection):
        self.connection = connection
        self.num_steps, self.last = 0, time.monotonic()

    def __call__(self) -> None:
        self.num_steps += 1
        if time.monotonic() - self.last >= REPORT_SECONDS:
            if self.connection.poll():  # between jobs the parent says nothing but goodbye
                raise Stopped
            self.send()

    def send(self) -> None:
        """Tell how many steps have been done since the last time."""
        if self.num_steps:
            self.connection.send(("steps", self.num_steps))
        self.num_steps, self.last = 0, time.monotonic()


def _end_with_parent() -> None:
    """Leave when the parent is gone, however it went: nobody would take the results."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _picklable(error: Exception) -> Exception:
    """Return the error, or its words where it cannot cross to the parent."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # an exception's own pickling may raise anything; its words still go
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def _out_of_memory(error: MemoryError) -> str:
    first_line = next(iter(str(error).splitlines()), "")
    return f"out of memory: {first_line:.200}".rstrip(": ")


def _cause(exit_code: int) -> str:
    if exit_code >= 0:
        return f"exited with code {exit_code}"
    name = signal.Signals(-exit_code).name
    return f"killed by {name}{' (out of memory?)' if name == 'SIGKILL' else ''}"


@contextmanager
def _interrupts_ignored() -> Iterator[None]:
    """Ignore Ctrl-C for a moment, so that processes started in it do so for good."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
