"""Run a function on several gloo processes and wait until all are done."""

import os
import sys
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

PATIENCE = timedelta(minutes=5)  # with a rank that does not come, or never joins a collective


def on_ranks(num, port, work, *arguments):
    """``work(rank, *arguments)`` on ``num`` processes; an error on any of them is raised here.

    The processes are forked from one that has loaded the libraries and computed nothing: forked
    from this one they would inherit autograd's threads, which do not survive it. Many tensors go
    in a file: each tensor of ``arguments`` is a file descriptor, and a process takes few of them.
    """
    mp.get_context("forkserver").set_forkserver_preload(["ranks", "levelhead"])
    mp.start_processes(_enter, (num, port, work, arguments), nprocs=num, start_method="forkserver")


def _enter(rank, num, port, work, arguments):
    torch.set_num_threads(1)
    with joined(rank, num, port):
        work(rank, *arguments)
    leave()


@contextmanager
def joined(rank, num, port):
    """This process as one rank of ``num``."""
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group(
        "gloo", timeout=PATIENCE, init_method=address, rank=rank, world_size=num
    )
    try:
        yield
    finally:
        dist.destroy_process_group()


def leave():
    """End this process, whose work is done, without taking the interpreter apart.

    Gloo's threads outlive the process group once a functional collective has run, and one of
    them that lets go of a tensor while Python finalizes aborts the process (pytorch#190489).
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
