"""The one mask rule: what each query may attend to, without a floating T x S matrix.

``attn_mask`` is boolean and True means "may attend"; ``attn_bias`` is added to the scores;
``is_causal`` aligns bottom-right when there are more keys than queries, so that cached decoding
equals the full pass. All three may come together, and all apply.
"""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from levelhead.shapes import complaint, describe, require


@dataclass(frozen=True)
class AttentionMask:
    """What each of T queries may attend to among S keys.

    Attributes:
        num_queries: T.
        num_keys: S.
        device: Where the attention runs.
        mask: True = may attend, broadcastable to ``[B, H, T, S]``, or None for "everything".
        bias: Added to the scores, same shape rule; what it forbids holds -inf. Or None.
        is_causal: Query t may attend to keys up to ``S - T + t`` only.
        bias_forbids: Whether the bias holds -inf; None where nobody has looked.
    """

    num_queries: int
    num_keys: int
    device: torch.device
    mask: Bool[Tensor, "#B #H #T #S"] | None = None
    bias: Float[Tensor, "#B #H #T #S"] | None = None
    is_causal: bool = False
    bias_forbids: bool | None = None

    def for_sdpa(self, dtype: torch.dtype) -> tuple[Tensor | None, bool]:
        """Return ``attn_mask`` and ``is_causal`` as ``F.scaled_dot_product_attention`` wants them.

        Args:
            dtype: The dtype of the query, which a float mask must share.

        Returns:
            A boolean or float mask or None, and whether the kernel's own (top-left) causal rule
            says the same as ours.
        """
        if self.mask is None and self.bias is None:
            if not self.is_causal or self.num_queries == 1:
                return None, False
            if self.num_queries == self.num_keys:
                return None, True
        allowed = self.allowed()
        if self.bias is None:
            return allowed, False
        bias = self.bias.to(dtype)
        return (bias if allowed is None else bias.masked_fill(~allowed, -torch.inf)), False

    def allowed(self) -> Bool[Tensor, "#B #H #T #S"] | None:
        """Return who may attend to whom by mask and causality (not by the bias), or None for all.

        Returns:
            True = may attend.
        """
        if not self.is_causal or self.num_queries == 1:
            return self.mask
        causal = causal_mask(self.num_queries, self.num_keys, self.device)
        return causal if self.mask is None else causal & self.mask

    def visible(self) -> Bool[Tensor, "#B #H #T #S"] | None:
        """Return who may attend to whom by mask, causality and the bias's -inf, or None for all.

        Returns:
            True = may attend.
        """
        allowed = self.allowed()
        if self.bias is None:
            return allowed
        finite = self.bias > -torch.inf
        return finite if allowed is None else finite & allowed

    def without_finite_bias(self) -> "AttentionMask":
        """Return a mask of the same visibility, without a bias that forbids nothing.

        Looks at the bias on the CPU outside compilation only, as the look would stall elsewhere.

        Returns:
            This mask, or one without the bias.
        """
        if self.bias is None:
            return self
        forbids = self.bias_forbids
        if forbids is None:
            forbids = not _can_look(self.bias) or self.bias.detach().amin().item() == -torch.inf
        return self if forbids else replace(self, bias=None)

    def apply(self, scores: Float[Tensor, "B H T S"]) -> Float[Tensor, "B H T S"]:
        """Add the bias to the scores and put -inf where a query may not attend.

        Args:
            scores: Scaled scores, capped where a cap is in use.

        Returns:
            Masked scores in the dtype of ``scores``.
        """
        if self.bias is not None:
            scores = scores + self.bias.to(scores.dtype)
        allowed = self.allowed()
        if allowed is None:
            return scores
        return scores.masked_fill(~allowed.to(scores.device), -torch.inf)

    def rows(self, start: int, stop: int) -> "AttentionMask":
        """Return the mask of the queries ``start`` to ``stop`` (exclusive).

        Args:
            start: First query.
            stop: One past the last.

        Returns:
            A mask with ``stop - start`` queries; under causality it ends with the last key that
            these queries may attend to.
        """
        last = self.num_keys - (self.num_queries - stop if self.is_causal else 0)
        mask, bias = (
            None if part is None else _block(part, start, stop, last)
            for part in (self.mask, self.bias)
        )
        # A part of a bias that forbids something may forbid nothing: it is looked at anew.
        forbids = None if self.bias_forbids else self.bias_forbids
        return replace(
            self, num_queries=stop - start, num_keys=last, mask=mask, bias=bias,
            bias_forbids=forbids,
        )  # fmt: skip

    def keys(self) -> "AttentionMask":
        """Return the mask without its causality.

        Returns:
            The same mask and bias for one query.
        """
        return replace(self, num_queries=1, is_causal=False)

    @property
    def is_key_padding(self) -> bool:
        """Whether, causality aside, all queries and heads see the same keys."""
        parts = [t for t in (self.mask, self.bias) if t is not None]
        return all(t.shape[1] == 1 and t.shape[2] == 1 for t in parts)


def _block(tensor: Tensor, start: int, stop: int, last: int) -> Tensor:
    rows = tensor if tensor.shape[-2] == 1 else tensor[..., start:stop, :]
    return rows if tensor.shape[-1] == 1 else rows[..., :last]


def causal_mask(
    num_queries: int, num_keys: int, device: torch.device | None = None
) -> Bool[Tensor, "1 1 T S"]:
    """Return the causal mask, aligned bottom-right.

        mask[t, s] = s <= t + (S - T)

    Args:
        num_queries: T.
        num_keys: S, at least T.
        device: Where to build it.

    Returns:
        True = may attend.
    """
    last_key = torch.arange(num_keys - num_queries, num_keys, device=device)[:, None]
    return (torch.arange(num_keys, device=device) <= last_key)[None, None]


def sliding_window_mask(
    num_queries: int, num_keys: int, window: int, device: torch.device | None = None
) -> Bool[Tensor, "1 1 T S"]:
    """Return the causal sliding-window mask, aligned bottom-right.

        mask[t, s] = 0 <= t + (S - T) - s < window

    Args:
        num_queries: T.
        num_keys: S, at least T.
        window: How many keys a query sees at most, itself included; positive.
        device: Where to build it.

    Returns:
        True = may attend.

    Raises:
        ValueError: ``window`` is not positive, or there are more queries than keys.
    """
    require(window > 0, "window must be positive", f"window={window}")
    _require_no_more_queries(num_queries, num_keys)
    distance = torch.arange(num_keys - num_queries, num_keys, device=device)[
        :, None
    ] - torch.arange(num_keys, device=device)
    return ((distance >= 0) & (distance < window))[None, None]


def resolve_mask(
    query: Float[Tensor, "B H T D"],
    key: Float[Tensor, "B Hkv S D"],
    attn_mask: Tensor | None = None,
    attn_bias: Tensor | None = None,
    is_causal: bool = False,
) -> AttentionMask:
    """Check what the user says about visibility and bring it into one form.

    Args:
        query: For its batch, heads and length.
        key: For its length.
        attn_mask: Boolean, True = may attend; ``[T, S]`` or broadcastable ``[B, H, T, S]``.
        attn_bias: Float, added to the scores; same shapes. Values at or below
            ``finfo(dtype).min / 2``, of the narrower of the bias's and the query's dtype, mean
            "may not attend" and become -inf.
        is_causal: Forbid the future, bottom-right.

    Returns:
        The mask in the one form; four axes.

    Raises:
        ValueError: A wrong shape or dtype, NaN or +inf in the bias (looked for on the CPU outside
            compilation only: elsewhere the look would stall the device), or more queries than
            keys under ``is_causal``.
    """
    sizes = (query.shape[0], query.shape[1], query.shape[2], key.shape[2])
    if is_causal:
        _require_no_more_queries(sizes[2], sizes[3])
    if attn_mask is not None:
        if not isinstance(attn_mask, Tensor) or attn_mask.dtype != torch.bool:
            raise ValueError(
                complaint(
                    "attn_mask must be boolean with True = may attend",
                    f"attn_mask={describe(attn_mask)}",
                    "a bool tensor; a float mask that is added to the scores goes to attn_bias",
                )
            )
        attn_mask = _four_axes("attn_mask", attn_mask, sizes)
    bias_forbids = None
    if attn_bias is not None:
        if not isinstance(attn_bias, Tensor) or not attn_bias.is_floating_point():
            raise ValueError(
                complaint(
                    "attn_bias must be a float tensor that is added to the scores",
                    f"attn_bias={describe(attn_bias)}",
                    "a float tensor; a boolean mask goes to attn_mask",
                )
            )
        attn_bias = _four_axes("attn_bias", attn_bias, sizes)
        highest = min(torch.finfo(t.dtype).max for t in (attn_bias, query))
        bias_forbids = _forbids(attn_bias, highest) if _can_look(attn_bias) else None
        if bias_forbids is not False:
            attn_bias = attn_bias.masked_fill(attn_bias <= -highest / 2, -torch.inf)
    return AttentionMask(
        sizes[2], sizes[3], query.device, attn_mask, attn_bias, is_causal, bias_forbids
    )


def _require_no_more_queries(num_queries: int, num_keys: int) -> None:
    if num_queries > num_keys:
        rule = (
            "is_causal aligns the last query with the last key, so queries may not outnumber keys"
        )
        raise ValueError(complaint(rule, f"T={num_queries}, S={num_keys}"))


def _four_axes(name: str, tensor: Tensor, sizes: tuple[int, int, int, int]) -> Tensor:
    fits = tensor.ndim in (2, 4) and all(
        have == want or have == 1
        for have, want in zip(reversed(tensor.shape), reversed(sizes), strict=False)
    )
    if not fits:
        raise ValueError(
            complaint(
                f"{name} must be broadcastable to [B, H, T, S] = {list(sizes)}",
                f"{name} of shape {list(tensor.shape)}",
                f"[T, S] or four axes, each of size 1 or full; "
                f"a padding mask [B, S] is passed as {name}[:, None, None, :]",
            )
        )
    return tensor if tensor.ndim == 4 else tensor[None, None]


def _can_look(attn_bias: Tensor) -> bool:
    is_on_cpu = not torch.compiler.is_compiling() and attn_bias.device.type == "cpu"
    return is_on_cpu and attn_bias.numel() > 0


def _forbids(attn_bias: Tensor, highest: float) -> bool:
    """Whether some of a bias means "may not attend"; refuses NaN and +inf."""
    ends = attn_bias.detach().aminmax()  # NaN wins both; no T x S copy is made
    lowest, largest = ends.min.item(), ends.max.item()
    require(
        largest <= highest,
        "attn_bias may hold finite numbers and -inf",
        f"a maximum of {largest}",
        f"at most {highest}, the largest number of its dtype and of the query's",
    )
    return lowest <= -highest / 2
