"""``train``: one training from start to end, on one device or many, resumed bit by bit."""

import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast_object_list

from levelhead.attention import Attention
from levelhead.harness.config import Cell
from levelhead.harness.engine.checkpoint import (
    CHECKPOINTS,
    latest_checkpoint,
    read_checkpoint,
    write_checkpoint,
)
from levelhead.harness.engine.folder import (
    check_folder,
    training_config,
    training_hash,
    write_config,
)
from levelhead.harness.engine.interval import Interval
from levelhead.harness.engine.log import METRICS, keep_events
from levelhead.harness.engine.options import (
    NUM_CHECKPOINTS,
    NUM_EVALUATIONS,
    NUM_LOGGED,
    EngineOptions,
    OnEvent,
)
from levelhead.harness.engine.prepare import block_names, make_accelerator
from levelhead.harness.engine.random_state import forked_random, seed_all
from levelhead.harness.engine.record import curves, num_parameters
from levelhead.harness.engine.split import split_batch
from levelhead.harness.engine.stop import Stopped, StopRequest, listening
from levelhead.harness.engine.trackers import check_trackers, start_trackers
from levelhead.harness.engine.training import ModelInTraining, StepResult
from levelhead.harness.runs import RunFolder
from levelhead.harness.seeding import named_seed
from levelhead.harness.tasks import Task
from levelhead.harness.train import are_finite, concentration, start_model
from levelhead.monitor import Monitor
from levelhead.monitor_writers import JsonlWriter

MONITOR = "monitor.jsonl"
PROJECT = "levelhead"
PROBE_SAMPLES = 64  # enough for a mean over rows; the weights of a whole batch may not fit


def train(
    task: Task,
    cell: Cell,
    folder: Path,
    options: EngineOptions | None = None,
    on_event: OnEvent = lambda kind, values: None,
) -> dict[str, Any]:
    """Train one model and keep everything in a folder.

    Started by ``torchrun`` or ``accelerate launch``, every process calls this; the first one
    writes. On one CPU or GPU a training that was killed and resumed gives the numbers of one that
    ran through, to the last digit.

    Args:
        task: Data, model, metric and how to train.
        cell: Variant, init and seed.
        folder: Where everything goes; all processes must see it.
        options: How to run.
        on_event: Told of notes, steps, evaluations and checkpoints.

    Returns:
        The record, as in a comparison's ``cells.jsonl``, with speed and the data's share of time.

    Raises:
        ValueError: A folder that holds something else, a global batch that the processes cannot
            share, a damaged training, an option that does not fit.
        Stopped: Ctrl-C or SIGTERM; what was done is saved.
        OSError: The log or the result could not be written; the last checkpoint stands.
    """
    options = options or EngineOptions()
    check_trackers(options.trackers)
    check_folder(folder, task.settings, cell, options.resume)
    with forked_random():
        model = start_model(task, cell)
    names = block_names(model) if options.shard else ()
    precision = task.settings.mixed_precision
    accelerator = make_accelerator(precision, options.trackers, folder, names)
    settings, num_ranks = task.settings, accelerator.num_processes
    largest = options.micro_batch_size or settings.micro_batch_size
    split = split_batch(settings.batch_size, largest, num_ranks, accelerator.process_index)
    config = training_config(settings, cell, num_ranks)
    accelerator.wait_for_everyone()
    with ExitStack() as stack:
        stack.enter_context(forked_random())
        if accelerator.is_main_process:
            run = RunFolder(folder)
            stack.enter_context(run.held())
        start_trackers(accelerator, PROJECT, config)  # may refuse: before anything is written
        if accelerator.is_main_process:
            write_config(folder, config)
        accelerator.wait_for_everyone()
        training = ModelInTraining(task, model, accelerator, split)
        return _Engine(training, cell, folder, options, on_event).run(stack)


class _Engine:
    """The loop around a model in training, and what it writes."""

    def __init__(
        self,
        training: ModelInTraining,
        cell: Cell,
        folder: Path,
        options: EngineOptions,
        on_event: OnEvent,
    ):
        self.training, self.cell, self.folder, self.options = training, cell, folder, options
        self.task, self.accelerator = training.task, training.accelerator
        self.is_main = self.accelerator.is_main_process
        steps = self.task.settings.steps
        self.save_every = options.every("save_every", steps, NUM_CHECKPOINTS)
        self.log_every = options.every("log_every", steps, NUM_LOGGED)
        self.evaluate_every = self.task.settings.evaluate_every or max(1, steps // NUM_EVALUATIONS)
        self.on_event = on_event if self.is_main else lambda kind, values: None
        self.step, self.diverged_step = 0, None
        self.times = {"seconds": 0.0, "waited_s": 0.0}
        self.concentration_start: float | None = None
        self.log: JsonlWriter | None = None

    def run(self, stack: ExitStack) -> dict[str, Any]:
        """Go on from what the folder holds to the end."""
        done = self._finished()
        if done is not None:
            self.note("this training is finished; nothing was left to do")
            return done
        request = stack.enter_context(listening())
        seed_all(self.cell.seed, self._dropout_name())
        self._watch()
        self._resume(stack)
        if self.step == 0:
            self.concentration_start = self._concentration()
        with self.training.monitor or nullcontext():
            self._train(request)
        return self._finish()

    def _finished(self) -> dict[str, Any] | None:
        found = [None]
        if self.is_main:
            records = RunFolder(self.folder).finished()
            found = [records[-1]] if records else [None]
        return self._from_main(found[0])

    def _from_main(self, value: Any) -> Any:
        return broadcast_object_list([value])[0] if self.accelerator.num_processes > 1 else value

    def _dropout_name(self) -> str:
        rank = self.accelerator.process_index
        return f"dropout, rank {rank}" if rank else "dropout"

    def _watch(self) -> None:
        every = self.options.monitor_every
        if every is not None:
            self.training.monitor = Monitor(
                self.training.model, every, self._write_scalars, jsonl=self.folder / MONITOR
            )

    def _write_scalars(self, step: int, scalars: Any) -> None:
        self.write("scalars", step=step + 1, values=dict(scalars))
        self.accelerator.log(dict(scalars), step=step + 1)

    def _resume(self, stack: ExitStack) -> None:
        """Load the newest whole checkpoint, cut the logs back to it and open them."""
        place, said = self.folder / CHECKPOINTS, list[str]()
        found = latest_checkpoint(place, said.append) if self.is_main else None
        path = self._from_main(found.path if found else None)
        if path is not None:
            checkpoint = found or read_checkpoint(path)
            self.training.load(checkpoint, self.cell.seed)
            self.step, self.times = checkpoint.step, checkpoint.state["times"]
            self.concentration_start = checkpoint.state["concentration_start"]
            said.append(f"going on after step {self.step}, from {path}")
        elif self.options.resume:
            said.append("no checkpoint was written yet; starting from the first step")
        if self.is_main:
            keep_events(self.folder / METRICS, lambda e: e.get("step", 0) <= self.step)
            keep_events(self.folder / MONITOR, lambda e: e.get("step", 0) < self.step)
            self.log = JsonlWriter(self.folder / METRICS)
            stack.callback(self.log.close)
        for text in said:
            self.note(text)

    def _train(self, request: StopRequest) -> None:
        settings, data = self.task.settings, self._batches()
        interval = Interval()
        for step in range(self.step + 1, settings.steps + 1):
            with interval.waiting():
                batch = next(data)
            result = self.training.step(batch, request)
            self.step = step
            self._tell(result, interval)
            if not math.isfinite(result.loss):
                self._diverge(f"the loss was {result.loss}")
                self._tell_monitor(result.loss)
                return
            if step % self.evaluate_every == 0 and step < settings.steps:
                found = self._evaluate()
                if not are_finite(found):
                    self._diverge(f"an evaluation gave {_shown(found)}")
                    return
            is_due = step % self.save_every == 0 or step == settings.steps
            interval.add_to(self.times)
            is_saved = (is_due or result.wants_stop) and self._save()
            if result.wants_stop and step < settings.steps:
                raise Stopped(step, self.folder, is_saved)

    def _batches(self) -> Iterator[Any]:
        return self.task.batches(named_seed(self.cell.seed, "batches"), self.step)

    def _tell(self, result: StepResult, interval: "Interval") -> None:
        shown = {"step": self.step, "loss": result.loss}
        settings = self.task.settings
        if self.step % self.log_every == 0 or self.step in (1, settings.steps):
            speed = interval.speed(self.step, settings.batch_size)
            values = {
                "train_loss_nats": result.loss, "learning_rate": result.learning_rate,
                "grad_norm": result.grad_norm, **speed,
            }  # fmt: skip
            self.write("step", step=self.step, **values)
            shown |= speed
            self._track("train/", values)
        self.on_event("step", shown)

    def _track(self, kind: str, values: Mapping[str, float | None]) -> None:
        if self.accelerator.trackers:
            numbers = {f"{kind}{k}": v for k, v in values.items() if v is not None}
            self.accelerator.log(numbers, step=self.step)

    def _diverge(self, why: str) -> None:
        self.diverged_step = self.step
        self.note(f"{why} at step {self.step}: the training ends here")

    def _tell_monitor(self, loss: float) -> None:
        if self.training.monitor is not None:
            self.training.monitor.note(loss=loss)
            self.training.monitor.end_step()

    def _evaluate(self) -> dict[str, float]:
        metrics = self.training.evaluate()
        self.write("evaluation", step=self.step, **metrics)
        self._track("test/", metrics)
        self.on_event("evaluation", {"step": self.step, **metrics})
        return metrics

    def _save(self) -> bool:
        """Write a checkpoint; a disk that is full costs the checkpoint, not the training."""
        tensors, numbers = self.training.tensors(), self.training.numbers()
        if not self.is_main:
            return True
        state = {
            "step": self.step,
            "hash": training_hash(self.task.settings, self.cell),
            "training": numbers,
            "times": self.times,
            "concentration_start": self.concentration_start,
        }
        try:
            path = write_checkpoint(self.folder / CHECKPOINTS, self.step, tensors, state)
        except OSError as error:
            self.note(f"no checkpoint of step {self.step}: {error}; the one before it is kept")
            return False
        self.on_event("checkpoint", {"step": self.step, "path": str(path)})
        return True

    def _concentration(self) -> float | None:
        """As a comparison measures it; not where weights are sharded."""
        modules = self.training.module.modules()
        if self.options.shard or not any(isinstance(module, Attention) for module in modules):
            return None
        probe = next(self.task.batches(named_seed(self.cell.seed, "probe")))
        inputs = probe[0][:PROBE_SAMPLES] if isinstance(probe, tuple) else None
        if not isinstance(inputs, torch.Tensor):
            return None
        return concentration(self.training.module, inputs.to(self.accelerator.device))

    def _finish(self) -> dict[str, Any]:
        final = None if self.diverged_step else self._evaluate()
        if final is not None and not are_finite(final):
            self._diverge(f"the last evaluation gave {_shown(final)}")
            final = None
        record = {
            **self.cell.model_dump(),
            "num_params": num_parameters(self.training.module),
            "concentration_start": self.concentration_start,
            "final": final,
            "diverged_step": self.diverged_step,
            "concentration_end": self._concentration(),
            "seconds": round(self.times["seconds"], 3),
            "data_wait_frac": round(self.times["waited_s"] / max(self.times["seconds"], 1e-9), 4),
            "num_processes": self.accelerator.num_processes,
            "hash": training_hash(self.task.settings, self.cell),
            **curves(self.folder / METRICS, self.task.settings.steps),
        }
        if self.is_main:
            RunFolder(self.folder).append(record)
        for tracker in self.accelerator.trackers:
            tracker.finish()
        return record

    def note(self, text: str) -> None:
        """Say something that a person should know."""
        self.write("note", step=self.step, text=text)
        self.on_event("note", {"text": text})

    def write(self, event: str, **values: Any) -> None:
        """Add an event to the log of the first process, once it is open."""
        if self.log is not None:
            self.log.write({"event": event, **values})


def _shown(metrics: Mapping[str, float]) -> str:
    lost = {name: value for name, value in metrics.items() if not math.isfinite(value)}
    return ", ".join(f"{name} {value}" for name, value in lost.items())
