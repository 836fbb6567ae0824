"""Run a model and see what goes into the kernel of each of its attentions, without changing it.

Nothing is switched to another implementation, no attention weights are asked for, and nothing is
kept: a callback gets each call while it happens.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from levelhead.shapes import require, without_autocast
from levelhead.sites.calls import AttentionCall, Seen
from levelhead.sites.find import find_attention
from levelhead.sites.operations import OperationWatcher
from levelhead.sites.own_calls import inner_of, listen_to
from levelhead.sites.reading import Reader, made_by
from levelhead.sites.sites import AttentionSite
from levelhead.sites.torch_calls import seen_in_landmarks, seen_in_multihead

OnAttention = Callable[[AttentionCall], None]
Undo = Callable[[], None]


@contextmanager
def capture(
    model: nn.Module,
    on_attention: OnAttention,
    *,
    sites: Sequence[AttentionSite] | None = None,
    readers: Sequence[Reader] = (),
) -> Iterator[None]:
    """Hand every attention call of a model to a callback while the block runs.

    The callback runs without gradients and without autocast; what it does not keep is not kept.
    A forward that runs again during backward (checkpointing) is not counted again. Everything
    is put back when the block ends, also by an exception. torch's encoder fast path, which runs
    past its own modules, is off meanwhile.

    Args:
        model: Any model with attention; not compiled.
        on_attention: Gets an ``AttentionCall`` for each call of each site.
        sites: Some of ``find_attention(model)``; all by default.
        readers: As in ``find_attention``.

    Raises:
        ValueError: No attention was found, the model is compiled, or (while the block runs) an
            attention ran in a way that cannot be seen.

    Example:
        >>> import torch, levelhead as lh
        >>> model = torch.nn.TransformerEncoderLayer(48, 3, batch_first=True)
        >>> shapes = []
        >>> with lh.capture(model, lambda call: shapes.append(tuple(call.query.shape))):
        ...     output = model(torch.randn(2, 7, 48))
        >>> shapes
        [(2, 3, 7, 16)]
    """
    _require_eager(model)
    sites = find_attention(model, readers=readers) if sites is None else list(sites)
    require(len(sites) > 0, "sites must name at least one attention", "sites=[]")
    modules = {id(module) for module in model.modules()}
    strangers = [site.name for site in sites if id(site.module) not in modules]
    require(not strangers, "sites must be those of this model", f"{strangers} of another")
    with ExitStack() as stack:
        calls: Counter[str] = Counter()
        for site in sites:
            _Watch(site, on_attention, calls).attach(stack)
        yield


class _Watch:
    """Watches one site: what its forward gets, and what its kernel gets meanwhile."""

    def __init__(self, site: AttentionSite, on_attention: OnAttention, calls: Counter[str]):
        self.site, self.on_attention, self.calls = site, on_attention, calls
        self.hidden_states: Tensor | None = None
        self.is_running, self.num_seen = False, 0
        self.mode: OperationWatcher | None = None
        self.begin: Begin = _begin_operations

    def attach(self, stack: ExitStack) -> None:
        """Put the hooks on, and their removal on the stack."""
        module = self.site.module
        stack.callback(self.leave)
        stack.callback(module.register_forward_hook(self._after, always_call=True).remove)
        stack.callback(module.register_forward_pre_hook(self._before, with_kwargs=True).remove)
        if inner_of(module) is not None:
            self.begin = _begin_nothing
            stack.callback(listen_to(module, self.emit))
        elif isinstance(module, nn.MultiheadAttention):
            self.begin = _begin_multihead
            stack.enter_context(_without_fast_path())
        elif self.site.kind == "landmark":
            self.begin = _begin_landmarks
        elif made_by(module, "transformers"):
            self._attach_to_transformers(stack)

    def _attach_to_transformers(self, stack: ExitStack) -> None:
        from levelhead.sites.transformers_calls import listen
        from levelhead.sites.transformers_sites import goes_through_interface

        if goes_through_interface(self.site.module):
            self.begin = _begin_nothing
            stack.callback(listen(self._hear))

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if _in_backward():
            return
        self.is_running, self.num_seen = True, 0
        self.hidden_states = _first_tensor(args, kwargs)
        self.begin(self, args, kwargs)

    def _after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        was_running = self.is_running
        self.leave()
        if was_running and output is not None and self.num_seen == 0:
            raise ValueError(
                f"the attention {self.site.name!r} ({type(module).__name__}) ran, but what went "
                "into its kernel could not be seen: it calls neither "
                "F.scaled_dot_product_attention nor a product, a softmax and a product that can "
                "be followed; leave it out with capture(sites=[...])"
            )

    def _hear(self, module: nn.Module, translate: Callable[[], Seen]) -> None:
        if module is self.site.module and self.is_running:
            self.emit(translate())

    def leave(self) -> None:
        """Stop watching the forward that runs, if any."""
        mode, self.mode = self.mode, None
        self.is_running, self.hidden_states = False, None
        if mode is not None:
            mode.__exit__(None, None, None)

    @torch.no_grad()
    def emit(self, seen: Seen) -> None:
        """Hand what was seen to the callback."""
        if not self.is_running:
            return
        self.num_seen += 1
        call_idx, self.calls[self.site.name] = self.num_calls, self.num_calls + 1
        found = vars(seen.with_four_axes(self.site.num_heads))
        found = {name: _detached(value) for name, value in found.items()}
        hidden_states = _tokens(_detached(self.hidden_states))
        with without_autocast(seen.query.device.type):
            self.on_attention(
                AttentionCall(self.site, call_idx, hidden_states=hidden_states, **found)
            )

    @property
    def num_calls(self) -> int:
        """Calls of this site so far."""
        return self.calls[self.site.name]


Begin = Callable[[_Watch, tuple[Any, ...], dict[str, Any]], None]


def _begin_nothing(watch: _Watch, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Somebody else tells."""


def _begin_operations(watch: _Watch, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    watch.mode = OperationWatcher(watch.emit)
    watch.mode.__enter__()


@torch.no_grad()
def _begin_multihead(watch: _Watch, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    watch.hidden_states, seen = seen_in_multihead(watch.site, args, kwargs)
    watch.emit(seen)


@torch.no_grad()
def _begin_landmarks(watch: _Watch, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    mask = kwargs.get("attention_mask", args[1] if len(args) > 1 else None)
    assert watch.hidden_states is not None
    watch.emit(seen_in_landmarks(watch.site, watch.hidden_states, mask))


def _require_eager(model: nn.Module) -> None:
    compiled = [
        name or type(model).__name__
        for name, module in model.named_modules()
        if hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None
    ]
    require(
        not compiled,
        "capture looks into eager code",
        f"compiled modules: {', '.join(compiled)}",
        "the model before torch.compile (compiled._orig_mod holds the same weights)",
    )


def _in_backward() -> bool:
    """Whether this forward is a checkpoint's second one, run by the autograd engine."""
    return torch._C._current_graph_task_id() != -1


@contextmanager
def _without_fast_path() -> Iterator[None]:
    """Keep torch's encoder on the path that calls its modules; captures may overlap freely."""
    if not _fast_path_before:
        _fast_path_before.append(torch.backends.mha.get_fastpath_enabled())
        torch.backends.mha.set_fastpath_enabled(False)
    else:
        _fast_path_before.append(_fast_path_before[0])
    try:
        yield
    finally:
        before = _fast_path_before.pop()
        if not _fast_path_before:
            torch.backends.mha.set_fastpath_enabled(before)


_fast_path_before: list[bool] = []


def _first_tensor(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    candidates = (kwargs.get("hidden_states"), *args, *kwargs.values())
    return next((value for value in candidates if isinstance(value, Tensor)), None)


def _tokens(hidden_states: Tensor | None) -> Tensor | None:
    """``[B, T, E]`` also of images ``[B, height, width, E]`` and packed tokens ``[T, E]``."""
    if hidden_states is None or hidden_states.ndim < 2:
        return None
    return hidden_states[None] if hidden_states.ndim == 2 else hidden_states.flatten(1, -2)


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value
