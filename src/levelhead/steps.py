"""State that moves once per training step, however often a layer runs within it.

Activation checkpointing runs a layer's forward twice, so state that a forward overwrites and
reads again gives silently wrong gradients. Here a forward reads only ``<name>_before`` and
writes only ``<name>``, which comes out the same however often it repeats; ``<name>_before``
takes over ``<name>`` once, when the outermost model begins its next training forward.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from levelhead.modes import is_in_backward
from levelhead.shapes import at_least_float32, require
from levelhead.sharding import is_gathered


class StepState(nn.Module):
    """A module whose state moves once per step of the outermost model (``track_steps``)."""

    def __init__(self):
        super().__init__()
        self.tracked = False
        self._states: tuple[str, ...] = ()

    def register_state(self, name: str, start: Tensor) -> None:
        """Register a pair of buffers, ``name`` and ``name_before``.

        Args:
            name: What the state is called.
            start: Its first value.
        """
        self.register_buffer(name, start)
        self.register_buffer(f"{name}_before", start.clone())
        self._states += (name,)

    @torch.no_grad()
    def set_state(self, name: str, value: Tensor | float) -> None:
        """Set both buffers of a state, as if every step so far had left this value.

        Args:
            name: What the state is called.
            value: The value.
        """
        for buffer in (self.get_buffer(name), self.get_buffer(f"{name}_before")):
            buffer.copy_(torch.as_tensor(value, dtype=buffer.dtype, device=buffer.device))

    def advance(self) -> None:
        """Let the next step begin where the last one ended."""
        for name in self._states:
            self.get_buffer(f"{name}_before").copy_(self.get_buffer(name))

    def pending(self) -> Tensor | None:
        """Return what must be summed over ranks before the step's state is final, or None."""
        return None

    def settle(self, total: Tensor) -> None:
        """Make the step's state final.

        Args:
            total: ``pending`` summed over all ranks.
        """

    def require_tracked(self) -> None:
        """Refuse a training forward that no ``track_steps`` watches.

        Raises:
            ValueError: The module is in training mode and not tracked.
        """
        require(
            self.tracked or not self.training,
            f"{type(self).__name__} keeps state that must move once per training step; call "
            "levelhead.track_steps(model) once on the outermost model, before compiling or "
            "wrapping it, or model.eval()",
            "a training forward of a model that is not tracked",
        )

    def _apply(self, fn, recurse=True):
        # Half precision would freeze a running mean: a step of it is below its resolution.
        before = dict(self._buffers)
        super()._apply(fn, recurse)
        for name, buffer in self._buffers.items():
            exact = before[name]
            if buffer is None or exact is None or not buffer.is_floating_point():
                continue
            wide = at_least_float32(buffer.dtype)
            if buffer.dtype != wide:
                source = buffer if exact.is_meta else exact
                self._buffers[name] = source.to(buffer.device, wide)
        return self


class StartsFromWeights(nn.Module):
    """A module that keeps something of its initial weights, taken before they are first used."""

    @property
    def is_derived(self) -> bool:
        """Whether nothing is left to take."""
        return True

    def derive(self) -> None:
        """Take it now."""

    def derived_parameters(self) -> list[nn.Parameter]:
        """Return the parameters that ``derive`` writes."""
        return []


def track_steps(model: nn.Module) -> nn.Module:
    """Let the state of a model's attention (running means, singular vectors) move once per step.

    A step is one training forward of ``model``: give the outermost module you call, before
    ``torch.compile``, DDP or FSDP wrap it. ``levelhead.convert`` and the models of levelhead
    have done it already. Calling it again, or on a part or a parent later, is safe: the last
    call wins within ``model``. Running means are reduced over ranks once per step, in one sum for
    all layers, at the end of the root's forward; within the step a layer uses its own rank's
    mean, which starts from the reduced mean of the step before.

    Known limits: eager checkpointing with two forwards of ``model`` before the first backward
    recomputes the first with the state of the second; ``model`` compiled and then checkpointed as
    a whole takes the repetition for a step (checkpoint its layers, or track what calls it).

    Args:
        model: The outermost module that is called in training.

    Returns:
        The same model.
    """
    for module in model.modules():
        if isinstance(module, StepState):
            module.tracked = True
    _stop_watching(model)
    model.register_forward_pre_hook(_begin_step)
    model.register_forward_hook(_end_step)
    return model


@contextmanager
def one_step(model: nn.Module) -> Iterator[None]:
    """Let all forwards within count as one step: the micro-batches of gradient accumulation.

    Each micro-batch uses its own mean, as each rank does; at the end running means become those
    of all micro-batches and ranks together. Every rank must enter, in the same order.

    Args:
        model: The outermost module, or what wraps it; ``track_steps`` must have seen it.

    Yields:
        Nothing.
    """
    states = [state for state in _states(model) if state.training]
    for state in states:
        state.advance()
    shares: list[Tensor] = []
    roots = [m for m in model.modules() if _end_step in m._forward_hooks.values()]
    for root in roots:
        vars(root)["_shares"] = shares
    try:
        yield
        if shares:
            _settle(states, torch.stack(shares).sum(dim=0))
    finally:
        for root in roots:
            del vars(root)["_shares"]


def stop_tracking(model: nn.Module) -> None:
    """Take back ``track_steps`` where nothing is left that keeps state.

    Args:
        model: The outermost module.
    """
    if not _states(model):
        _stop_watching(model)


def _stop_watching(model: nn.Module) -> None:
    for module in model.modules():
        _remove(module._forward_pre_hooks, _begin_step)
        _remove(module._forward_hooks, _end_step)


def _remove(hooks, hook) -> None:
    for key in [key for key, value in hooks.items() if value is hook]:
        del hooks[key]


def _states(model: nn.Module) -> list[StepState]:
    return [module for module in model.modules() if isinstance(module, StepState)]


@torch.no_grad()
def _begin_step(model: nn.Module, args) -> None:
    _derive_whole(model)
    if model.training and "_shares" not in vars(model) and not is_in_backward():
        for state in _states(model):
            state.advance()


def _derive_whole(model: nn.Module) -> None:
    """Let modules start from whole weights: within a sharded forward a new value would be lost."""
    if torch.compiler.is_compiling() or not dist.is_available() or not dist.is_initialized():
        return
    modules = [m for m in model.modules() if isinstance(m, StartsFromWeights)]
    waiting = [module for module in modules if not module.is_derived]
    for module in waiting:
        require(
            not any(is_gathered(parameter, model) for parameter in module.derived_parameters()),
            f"{type(module).__name__} must take the norms of its initial weights before a "
            "forward gathers them; call its derive() on every rank, or fully_shard its block too",
            "parameters in the root's own group of fully_shard",
        )
        module.derive()


@torch.no_grad()
def _end_step(model: nn.Module, args, output) -> None:
    if not model.training:
        return
    is_one_of_many = "_shares" in vars(model)
    if not is_one_of_many and not (dist.is_available() and dist.is_initialized()):
        return
    states = [state for state in _states(model) if state.training]
    share = _pending(states)
    if is_one_of_many:
        vars(model)["_shares"].extend([] if share is None else [share])
    elif share is not None:
        _settle(states, share)


def _pending(states: list[StepState]) -> Tensor | None:
    """What all layers wait for, in one new tensor, so that ranks sum it at once."""
    parts = [part for state in states if (part := state.pending()) is not None]
    return torch.cat(parts) if parts else None


@torch.no_grad()
def _settle(states: list[StepState], packed: Tensor) -> None:
    if dist.is_available() and dist.is_initialized():
        dist.all_reduce(packed)
    open_states = [(state, part) for state in states if (part := state.pending()) is not None]
    sizes = [part.numel() for _, part in open_states]
    for (state, _), total in zip(open_states, packed.split(sizes), strict=True):
        state.settle(total)
