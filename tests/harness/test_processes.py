"""A process that dies takes nothing with it but its own attempt."""

import multiprocessing
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import dying
from levelhead.harness import processes
from levelhead.harness.processes import run_here, run_in_processes


def attempts(folder, name):
    return len(list(folder.glob(f"{name}-*")))


@pytest.fixture(scope="module")
def after_deaths(tmp_path_factory):
    """One crew of two, six jobs: two are well, others are killed, exit, lack memory."""
    folder = tmp_path_factory.mktemp("jobs")
    jobs = [
        ("well", folder, "kill", 0),
        ("once", folder, "kill", 1),
        ("always", folder, "kill", 99),
        ("exits", folder, "exit", 1),
        ("hungry", folder, "memory", 2),
        ("last", folder, "kill", 0),
    ]
    steps = []
    results = run_in_processes(jobs, dying.marked, 2, steps.append, retries=2)
    return folder, {result.job[0]: result for result in results}, steps


def test_a_killed_worker_is_replaced_and_its_job_done_again(after_deaths):
    folder, results, _ = after_deaths
    assert results["once"].value == "once"
    assert results["once"].deaths == ("killed by SIGKILL (out of memory?)",)
    assert attempts(folder, "once") == 2


def test_a_job_that_always_dies_is_given_up_after_the_stated_retries(after_deaths):
    folder, results, _ = after_deaths
    assert results["always"].value is None
    assert results["always"].deaths == ("killed by SIGKILL (out of memory?)",) * 3
    assert attempts(folder, "always") == 3


def test_other_ends_are_told_apart(after_deaths):
    folder, results, _ = after_deaths
    assert results["exits"].deaths == ("exited with code 7",)
    assert results["hungry"].deaths == ("out of memory: cannot allocate 7 bytes",) * 2
    assert (results["exits"].value, results["hungry"].value) == ("exits", "hungry")


def test_the_other_jobs_are_done_once(after_deaths):
    folder, results, _ = after_deaths
    assert len(results) == 6
    for name in ("well", "last"):
        assert (results[name].value, results[name].deaths) == (name, ())
        assert attempts(folder, name) == 1


def test_every_step_of_what_is_done_was_told(after_deaths):
    _, results, steps = after_deaths
    assert sum(steps) == sum(result.value is not None for result in results.values()) == 5


def test_nobody_is_left(after_deaths):
    assert not multiprocessing.active_children()


def test_starting_a_process_is_counted_with_its_first_job_alone(after_deaths):
    _, results, _ = after_deaths
    started = [result for result in results.values() if result.start_s > 0]
    assert 2 <= len(started) < len(results)  # two of the crew; those that replaced the dead ones


@pytest.mark.parametrize("how", ["wrong", "unpicklable"])
def test_what_the_work_raises_is_raised_here(tmp_path, how):
    expected = {"wrong": ValueError, "unpicklable": RuntimeError}[how]
    words = {"wrong": "the work is wrong", "unpicklable": "Unpicklable: two parts"}[how]
    job = ("one", tmp_path, how, 1)
    with pytest.raises(expected, match=words) as caught:
        list(run_in_processes([job], dying.marked, 1, lambda steps: None))
    assert "in _go_wrong" in str(caught.value.__cause__)
    assert not multiprocessing.active_children()


def test_a_killed_attempts_steps_are_taken_back(tmp_path, monkeypatch):
    """The sum of what ``on_steps`` hears is the steps that count."""
    counted = []

    def kill_the_first_to_report(steps):
        counted.append(steps)
        if len(counted) == 1:
            (child,) = multiprocessing.active_children()
            child.kill()
        elif sum(counted) > 0:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(run_in_processes([tmp_path], dying.endless, 1, kill_the_first_to_report))
    assert len(list(tmp_path.glob("pid-*"))) == 2
    back = counted.index(min(counted))
    assert counted[back] == -sum(counted[:back]) < 0


def test_whoever_stops_listening_ends_the_processes(tmp_path):
    pids = []

    def stop_at_the_second(steps):
        pids.append(steps)
        if len(pids) == 2:
            raise KeyboardInterrupt

    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        list(run_in_processes([tmp_path] * 2, dying.endless, 2, stop_at_the_second))
    assert not multiprocessing.active_children()
    assert time.monotonic() - started < processes.STOP_SECONDS + 60


def test_processes_that_cannot_start_are_an_error_and_no_loop(monkeypatch):
    monkeypatch.setattr(processes, "_serve", os._exit)  # its argument is no code: it raises

    def start_badly(work):
        return real_start(os.getpid)

    real_start = processes._start
    monkeypatch.setattr(processes, "_start", start_badly)
    with pytest.raises(RuntimeError, match=r"no worker process can start: exited with code 1;"):
        list(run_in_processes([1], dying.marked, 1, lambda steps: None, retries=1))


def test_here_lack_of_memory_is_survived_and_all_else_is_raised(tmp_path):
    steps = []
    jobs = [("hungry", tmp_path, "memory", 1), ("starved", tmp_path, "memory", 99)]
    hungry, starved = run_here(jobs, dying.marked, steps.append, retries=2)
    assert (hungry.value, len(hungry.deaths)) == ("hungry", 1)
    assert (starved.value, len(starved.deaths)) == (None, 3)
    assert sum(steps) == 1
    with pytest.raises(ValueError, match="the work is wrong"):
        list(run_here([("one", tmp_path, "wrong", 1)], dying.marked, steps.append))


COPIES = """
import os, sys, multiprocessing
sys.path.insert(0, {tests!r})
import dying
from levelhead.harness.processes import Crew
with Crew(dying.marked) as crew:
    crew.copy_program(2)
    copies = {{worker.process.pid for worker in crew.workers}}
    assert len(copies) == 2
    jobs = [(name, {folder!r}, how, times) for name, how, times in
            [("a", "kill", 0), ("b", "kill", 1), ("c", "kill", 0)]]
    found = {{result.job[0]: result for result in crew.do(jobs, 2, lambda steps: None)}}
    kept = {{worker.process.pid for worker in crew.workers}}
    assert kept & copies and kept != copies, "one copy is left, one was replaced"
    again = list(crew.do([("d", {folder!r}, "kill", 0)], 2, lambda steps: None))
    assert {{worker.process.pid for worker in crew.workers}} == kept, "nobody is started anew"
    assert again[0].start_s == 0
    idle = list(crew.workers)
assert not multiprocessing.active_children()
print([(name, len(result.deaths)) for name, result in sorted(found.items())])
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only there is a program copied")
def test_copies_of_a_program_work_are_replaced_and_wait_for_the_next_call(tmp_path):
    script = COPIES.format(tests=str(Path(dying.__file__).parent), folder=str(tmp_path))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[('a', 0), ('b', 1), ('c', 0)]"


ORPHANS = """
import os, sys, time
sys.path.insert(0, {tests!r})
import dying
from levelhead.harness.processes import Crew
crew = Crew(dying.endless)
crew.copy_program(3)
print(*(worker.process.pid for worker in crew.workers), flush=True)
for _ in crew.do([{folder!r}] * 2, 3, lambda steps: os.kill(os.getpid(), 9)):
    pass
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only there is a program copied")
def test_copies_end_with_their_program_however_it_ends(tmp_path):
    """Killed at two jobs, one copy idle: nobody is left, though copies know each other's pipes."""
    script = ORPHANS.format(tests=str(Path(dying.__file__).parent), folder=str(tmp_path))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == -9, done.stderr
    pids = [int(pid) for pid in done.stdout.split()]
    assert len(pids) == 3
    deadline = time.monotonic() + 60
    while any(Path(f"/proc/{pid}/cmdline").exists() and is_alive(pid) for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def is_alive(pid):
    """A zombie that nobody has waited for yet is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_process_beside_other_threads_is_not_copied():
    release = threading.Event()
    other = threading.Thread(target=release.wait)
    other.start()
    try:
        with processes.Crew(dying.marked) as crew:
            crew.copy_program(2)
            assert crew.workers == []
    finally:
        release.set()
        other.join()
