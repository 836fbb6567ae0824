"""A training of a second for tests of the engine, and processes to run, join and kill it in."""

import functools
import multiprocessing
import os
import time
from pathlib import Path

import torch
import torch.nn.functional as F

from levelhead.harness.config import Cell, TrainingSettings
from levelhead.harness.models.gpt import GPT, GPTConfig
from levelhead.harness.parameter_groups import decayed_apart
from levelhead.harness.seeding import named_seed, paired_init_
from levelhead.harness.tasks import Metric
from ranks import leave

VOCAB, LENGTH = 17, 11
SECONDS = 120  # after which a process that should have done something is given up


class TinyText:
    """A GPT on made sequences that count up in steps of their own."""

    metric = Metric("loss_nats", "loss", "nats", False, 3)

    def __init__(self, dropout_p=0.0, **overrides):
        chosen = {
            "steps": 8, "batch_size": 12, "learning_rate": 1e-2, "weight_decay": 0.1,
            "clip_norm": 1.0, "warmup_steps": 2, **overrides,
        }  # fmt: skip
        self.settings = TrainingSettings(name="tiny", model="gpt", data="made", **chosen)
        self.dropout_p = dropout_p

    def build(self, variant):
        config = GPTConfig(
            vocab_size=VOCAB, context_length=LENGTH, embed_dim=12, num_layers=2, num_heads=3,
            dropout_p=self.dropout_p, variant=variant,
        )  # fmt: skip
        return GPT(config)

    def start(self, variant, seed):
        model = self.build(variant)
        paired_init_(model, seed)
        return model

    def batches(self, seed, start_step=0):
        step = start_step
        while True:
            yield self.batch(named_seed(seed, f"step {step}"), self.settings.batch_size)
            step += 1

    def batch(self, seed, size):
        generator = torch.Generator().manual_seed(seed)
        first, stride = torch.randint(VOCAB, (2, size, 1), generator=generator)
        tokens = (first + stride * torch.arange(LENGTH + 1)) % VOCAB
        return tokens[:, :-1], tokens[:, 1:]

    def loss(self, model, batch):
        tokens, following = batch
        return F.cross_entropy(model(tokens).flatten(0, 1), following.flatten())

    @torch.no_grad()
    def evaluate(self, model):
        model.eval()
        return {"loss_nats": self.loss(model, self.batch(1, 23)).item()}

    def parameter_groups(self, model):
        return decayed_apart(model, self.settings.weight_decay)


def tiny_cell(variant="softmax", seed=0):
    return Cell(task="tiny", variant=variant, init="default", seed=seed)


def start_process(work, *arguments):
    """Start a function in a process of its own; the libraries are loaded once for all of them."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tiny_training", "levelhead.harness.engine.engine"])
    process = context.Process(target=_alone, args=(work, arguments))
    process.start()
    return process


def _alone(work, arguments):
    torch.set_num_threads(1)
    work(*arguments)


def run_ranks(num, port, work, *arguments):
    """Run a function on gloo processes, as torchrun does, and wait until all are done."""
    ranks = [start_process(_join, rank, num, port, work, arguments) for rank in range(num)]
    try:
        for process in ranks:
            process.join(SECONDS)
        assert [process.exitcode for process in ranks] == [0] * num
    finally:
        for process in ranks:
            process.kill()


def _join(rank, num, port, work, arguments):
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num, "LOCAL_WORLD_SIZE": num,
             "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": 1}  # fmt: skip
    os.environ.update({name: str(value) for name, value in names.items()})
    from levelhead.harness.engine.prepare import leave_group

    work(*arguments)
    leave_group()
    leave()


def hang(marker):
    """Say where one is and stay there until killed."""
    Path(marker).touch()
    time.sleep(10 * SECONDS)


def kill_at(marker, work, *arguments):
    """Start a function, wait until it reached the marker, and kill -9 it there."""
    process = start_process(work, *arguments)
    try:
        wait_for(marker, process)
    finally:
        process.kill()
        process.join(SECONDS)


def wait_for(marker, process):
    deadline = time.monotonic() + SECONDS
    while not Path(marker).exists():
        assert process.is_alive(), f"ended with {process.exitcode} before it reached {marker}"
        assert time.monotonic() < deadline, f"never reached {marker}"
        time.sleep(0.02)


def at_call(number, before, function):
    """Wrap a function so that something happens before its call of that number, from 1."""
    calls = 0

    @functools.wraps(function)
    def counted(*arguments, **named):
        nonlocal calls
        calls += 1
        if calls == number:
            before()
        return function(*arguments, **named)

    return counted
