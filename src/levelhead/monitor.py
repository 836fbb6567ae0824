"""``Monitor``: the health of every attention while a model trains.

Every so many optimiser steps the calls of all sites are measured while they happen. A compiled
model is left alone: its measured steps run once more, eagerly and without gradients.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook

from levelhead.capture import capture
from levelhead.diagnose import in_eval_mode
from levelhead.measure.row_block import MEASURES
from levelhead.measure.streaming import DEFAULT_QUERIES
from levelhead.monitor_alerts import Alert, Watch, as_event
from levelhead.monitor_gradients import gradient_squares
from levelhead.monitor_sites import StepSums, num_processes, scalars
from levelhead.monitor_writers import JsonlWriter, as_writer
from levelhead.shapes import require, require_known
from levelhead.sites.find import find_attention
from levelhead.sites.reading import Reader

METRICS = ("entropy_nats", "normalized_entropy", "p_max", "sink_mass", "score_max", "score_std")
"""What is measured by default; any measure of ``measure.concentration`` can be."""

FORMAT = 1


class Monitor:
    """Writes live scalars ``attn/{layer}/{head|mean|max|q99}/{metric}`` and alerts.

    A head's number is the mean over its rows, of ``score_max`` the largest, over all micro-batches
    of the step; mean, max and q99 are over heads. A step ends when an optimiser of the model
    steps after a forward (those without gradients are evaluation and not counted), or by
    ``end_step``. With several processes there is one MAX and one SUM a measured step.

    Args:
        model: Any model with attention; may be compiled or wrapped for data parallelism.
        every: Measure every so many steps, the first among them.
        writer: See ``monitor_writers.as_writer``; None for the JSONL file alone.
        metrics: Measures of ``measure.concentration``.
        jsonl: The file that is always written, by the first process.
        num_queries: Queries looked at in each sample, evenly spaced; None for all.
        on_alert: Called with each ``Alert``.
        auto_step: Whether an optimiser's step ends the step; otherwise call ``end_step``.
        readers: As in ``find_attention``.

    Raises:
        ValueError: No attention, an unknown metric, or a number out of range; later, an optimiser
            that steps within the backward pass, where gradients are not whole.

    Example:
        >>> import torch, levelhead as lh, tempfile, pathlib
        >>> model = torch.nn.TransformerEncoderLayer(48, 3, batch_first=True)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "monitor.jsonl"
        >>> with lh.Monitor(model, every=2, jsonl=path) as monitor:
        ...     for _ in range(3):
        ...         loss = model(torch.randn(2, 7, 48)).square().mean()
        ...         loss.backward()
        ...         monitor.note(loss=loss)
        ...         optimizer.step()
        >>> monitor.measured_steps
        [0, 2]
    """

    def __init__(
        self,
        model: nn.Module,
        every: int = 50,
        writer: Any = None,
        metrics: Sequence[str] = METRICS,
        *,
        jsonl: str | Path = "monitor.jsonl",
        num_queries: int | None = DEFAULT_QUERIES,
        on_alert: Callable[[Alert], None] = lambda alert: None,
        auto_step: bool = True,
        readers: Sequence[Reader] = (),
    ):
        require(isinstance(every, int), "every must be a whole number", f"every={every!r}")
        require(every >= 1, "every must be at least 1", f"every={every}")
        for metric in metrics:
            require_known("metric", metric, MEASURES)
        self.model = unwrapped(model)
        self.every, self.auto_step = every, auto_step
        sites = find_attention(self.model, readers=readers)
        is_inside = all(site.module is not self.model for site in sites)
        must = "the attention must be a part of the model, not the model itself"
        require(is_inside, must, type(model).__name__, "nn.Sequential(attention)")
        self.sums = StepSums(sites, tuple(metrics), num_queries)
        self.watch = Watch()
        self.step = 0
        self.measured_steps: list[int] = []
        self.alerts: list[Alert] = []
        self.latest: dict[str, float] = {}
        self.mode = ""
        self._write, self._jsonl_path, self._on_alert = as_writer(writer), Path(jsonl), on_alert
        self._jsonl: JsonlWriter | None = None
        self._noted: dict[str, list[float]] = {"loss": [], "grad_norm": []}
        self._seen_losses: list[float] = []
        self._measure_next = self._is_probing = self._has_run = self._is_alarmed = False
        self._own_optimizers: WeakSet[torch.optim.Optimizer] = WeakSet()
        self._probe: Any = torch.compiler.disable(self._run_again)
        self._stack = ExitStack()
        self._capturing = ExitStack()

    def __enter__(self) -> "Monitor":
        stack, model = self._stack, self.model
        if _is_first_process():
            self._jsonl = JsonlWriter(self._jsonl_path)
            stack.callback(self._jsonl.close)
        stack.callback(self._capturing.close)
        stack.callback(model.register_forward_pre_hook(self._before, with_kwargs=True).remove)
        stack.callback(model.register_forward_hook(self._after, always_call=True).remove)
        if self.auto_step:
            stack.callback(register_optimizer_step_post_hook(self._on_optimizer).remove)
        self._event({
            "event": "start", "step": self.step, "every": self.every,
            "layers": [site.name for site in self.sums.sites], "metrics": self.sums.metrics,
        })  # fmt: skip
        return self

    def __exit__(self, *exception: object) -> None:
        self.sums.reset()
        self._stack.close()

    @property
    def is_due(self) -> bool:
        """Whether the step that runs is measured."""
        return self._measure_next or self.step % self.every == 0

    def note(
        self, loss: Tensor | float | None = None, grad_norm: Tensor | float | None = None
    ) -> None:
        """Hand over what only the training loop knows, before the optimiser steps.

        Args:
            loss: The raw loss; several of one step (micro-batches) are averaged. Without it that
                of a transformers model called with labels is taken.
            grad_norm: The norm before clipping, as ``clip_grad_norm_`` returns it. Without it the
                norm of the gradients is taken at each measured step, after any clipping.
        """
        for name, value in (("loss", loss), ("grad_norm", grad_norm)):
            if value is not None:
                self._noted[name].append(_number(value))

    @torch.no_grad()
    def end_step(self) -> None:
        """End the step: reduce, write and judge what was measured, then start anew."""
        noted = self._noted | {"loss": self._noted["loss"] or self._seen_losses}
        noted = {name: sum(values) / len(values) for name, values in noted.items() if values}
        alerts = list(self.watch.of_curves(self.step, noted))
        self._is_alarmed |= self.watch.is_alarmed
        was_due = self.is_due
        if was_due:
            alerts += self._measured(noted)
        for alert in alerts:
            self._tell(alert)
        # Ranks must agree on which steps are measured: they do in a measured step, by its MAX.
        agree = was_due or num_processes() == 1
        self._measure_next = self._is_alarmed and agree
        self._is_alarmed, self._has_run = self._is_alarmed and not agree, False
        self._noted, self._seen_losses = {"loss": [], "grad_norm": []}, []
        if was_due:  # in between nothing was added
            self.sums.reset()
        self.step += 1

    def _measured(self, noted: dict[str, float]) -> list[Alert]:
        alerts = self._reduced(noted)
        if self.sums.num_calls == 0:
            text = "no attention ran, or it could not be seen, in a step that was to be measured"
            return [*alerts, Alert(self.step, "not_seen", text)]
        statistics = self.sums.statistics()
        self.latest = scalars(statistics) | {f"train/{n}": value for n, value in noted.items()}
        self.measured_steps.append(self.step)
        if _is_first_process():
            self._write(self.step, self.latest)
        self._event({"event": "scalars", "step": self.step, "mode": self.mode,
                     "values": self.latest})  # fmt: skip
        raw_share = {name: share.tolist() for name, share in self.sums.raw_share.items()}
        found = self.watch.of_attention(self.step, statistics, raw_share, self.sums.first_broken())
        return [*alerts, *found, *self.watch.of_divergence(self.step)]

    def _reduced(self, noted: dict[str, float]) -> list[Alert]:
        """Bring the ranks together, and take the norm of the gradients where nobody noted it."""
        squares = None
        if "grad_norm" not in noted:
            squares = gradient_squares(self.model, num_processes())
        own = 0.0 if squares is None else squares[1]
        loss = noted.get("loss", 0.0)
        alarm = torch.tensor([float(self._is_alarmed)], dtype=torch.float64)
        added = torch.tensor([own, loss, float("loss" in noted)], dtype=torch.float64)
        device = next(self.model.parameters()).device
        self.sums.reduce(device, largest=alarm, added=added)
        self._is_alarmed = bool(alarm[0])
        if added[2]:
            noted["loss"] = float(added[1] / added[2])
        if squares is None:
            return []
        noted["grad_norm"] = math.sqrt(squares[0] + float(added[0]))
        alerts = list(self.watch.of_curves(self.step, {"grad_norm": noted["grad_norm"]}))
        self._is_alarmed |= self.watch.is_alarmed
        return alerts

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling():
            self._probe(args, kwargs)
        elif not self._is_probing and self._counts():
            if not self.is_due:
                return
            if _has_compiled_parts(self.model):
                self._probe(args, kwargs)
            else:
                self.mode = "live"
                sites = self.sums.sites
                self._capturing.enter_context(capture(module, self.sums.add, sites=sites))

    def _counts(self) -> bool:
        """Whether this forward belongs to training; evaluation in between does not."""
        if self.auto_step and not torch.is_grad_enabled():
            return False
        self._has_run = True
        return True

    def _after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        if not self._is_probing:
            self._capturing.close()
            loss = _loss_of(output)
            if loss is not None and self._has_run and torch.is_grad_enabled():
                self._seen_losses.append(_number(loss))

    def _run_again(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Run a batch once more, eagerly, to measure what compiled code does not show."""
        if self._is_probing or not self._counts():
            return
        if not self.is_due:
            return
        self.mode = "probe"
        self._is_probing = True
        try:
            watching = capture(self.model, self.sums.add, sites=self.sums.sites)
            with torch.no_grad(), in_eval_mode(self.model), _uncompiled(self.model), watching:
                self.model(*args, **kwargs)
        finally:
            self._is_probing = False

    def _on_optimizer(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """End the step at the first optimiser of the model that steps after a forward."""
        if self._has_run and self._is_own(optimizer):
            require(
                torch._C._current_graph_task_id() == -1,
                "auto_step needs an optimiser that steps after the backward pass",
                f"{type(optimizer).__name__}, which steps within it",
                "Monitor(..., auto_step=False), and end_step() after each step",
            )
            self.end_step()

    def _is_own(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether an optimiser moves parameters of the model; asked once of those that do.

        A frozen model belongs to whatever is trained on top of it.
        """
        if optimizer in self._own_optimizers:
            return True
        own = list(self.model.parameters())
        ids = {id(parameter) for parameter in own}
        groups = optimizer.param_groups
        moves = any(id(parameter) in ids for group in groups for parameter in group["params"])
        if not moves and any(parameter.requires_grad for parameter in own):
            return False
        self._own_optimizers.add(optimizer)
        return True

    def _tell(self, alert: Alert) -> None:
        self.alerts.append(alert)
        event = as_event(alert)
        if alert.kind.startswith("nonfinite") and self.watch.healthy is not None:
            event["healthy"] = self.watch.healthy[1]
        self._event(event)
        self._on_alert(alert)

    def _event(self, event: Mapping[str, Any]) -> None:
        if self._jsonl is not None:
            self._jsonl.write(event)

    def state_dict(self) -> dict[str, Any]:
        """Return plain values to save with the run.

        Returns:
            Step, curves, last healthy statistics, what was told.
        """
        return {"format": FORMAT, "step": self.step, "watch": self.watch.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where a saved run stopped.

        Args:
            state: As ``state_dict`` returned it.

        Raises:
            ValueError: Not the state of a monitor.
        """
        fits = isinstance(state, Mapping) and state.get("format") == FORMAT
        require(fits, "state must be that of a Monitor", f"{type(state).__name__}", "state_dict()")
        self.step = int(state["step"])
        self.watch.load_state_dict(state["watch"])


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the module inside torch.compile, data parallelism and Lightning Fabric.

    Args:
        model: Any.

    Returns:
        The module whose names and parameters people know.
    """
    while True:
        if isinstance(model, DistributedDataParallel):
            model = model.module
        elif hasattr(model, "_orig_mod"):
            model = model._orig_mod  # pyright: ignore[reportAssignmentType]
        elif type(model).__module__.startswith("lightning.fabric"):
            model = model._forward_module  # pyright: ignore[reportAssignmentType]
        else:
            return model


def _number(value: Tensor | float) -> float:
    if not isinstance(value, Tensor):
        return float(value)
    full = getattr(value.detach(), "full_tensor", None)
    return float(value.detach() if full is None else full())


def _loss_of(output: Any) -> Tensor | None:
    """The loss that transformers' models put into their output."""
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    return loss.detach() if isinstance(loss, Tensor) and loss.numel() == 1 else None


def _is_first_process() -> bool:
    distributed = torch.distributed
    ready = distributed.is_available() and distributed.is_initialized()
    return not ready or distributed.get_rank() == 0


def _has_compiled_parts(model: nn.Module) -> bool:
    return any(
        getattr(module, "_compiled_call_impl", None) is not None for module in model.modules()
    )


@contextmanager
def _uncompiled(model: nn.Module) -> Iterator[None]:
    """Let modules compiled in place run eagerly."""
    compiled = {
        module: module._compiled_call_impl
        for module in model.modules()
        if getattr(module, "_compiled_call_impl", None) is not None
    }
    for module in compiled:
        module._compiled_call_impl = None
    try:
        yield
    finally:
        for module, call in compiled.items():
            module._compiled_call_impl = call
