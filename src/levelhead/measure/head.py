"""One attention head as data and as a plain float64 function: what Jacobians are taken of.

    query = query_map(X W_Q),  key = key_map(X W_K),  value = X W_V
    attn_weights = row_scale softmax(cap(scale query key^T) + attn_bias) + row_shift visible
    A = output_map(output_gate * (attn_weights value))

Every variant of the library that changes A is a choice of these slots, so the Jacobian of each is
known by structure (`levelhead.measure.linearise`).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from levelhead.shapes import require, require_float
from levelhead.stages.masks import AttentionMask, resolve_mask

RowMap = Callable[[Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class HeadForm:
    """How a head differs from plain softmax attention; the default differs in nothing.

    | variant | slots |
    |---|---|
    | quest | ``key_map`` = unit norm, and ``scale=1`` |
    | qnorm, qknorm | ``query_map`` (and ``key_map``) = unit norm; gains go into the maps |
    | soft_cap | ``soft_cap`` |
    | off_by_one, sink | ``sink_score`` = 0, or the learned score of this head |
    | affine | ``row_scale`` = alpha, ``row_shift`` = (alpha_ma - alpha) / N |
    | precondition | ``output_map`` = row equilibration |
    | gate | ``output_gate`` = the sigmoid of this head's gate logits |
    | spectral, sigma_reparam | pass the effective weight (``W + C``) as the weight |

    Attributes:
        query_map: Acts on each row of ``[T, D]`` by itself, the row's position included (rotary
            embedding, q norm, or one after the other), written in torch operations.
        key_map: The same for the keys, ``[S, D]``.
        soft_cap: ``cap tanh(scores / cap)`` before bias and mask.
        sink_score: Score of an extra key without a value.
        row_scale: ``[T]``, factor on the softmax weights of each query; held fixed.
        row_shift: ``[T]``, added to the weight of each visible key; held fixed.
        output_gate: ``[T, D]`` or ``[T, 1]``, factor on the output; held fixed.
        output_map: Acts on each row of the output ``[T, D]`` by itself, before the gate.
    """

    query_map: RowMap | None = None
    key_map: RowMap | None = None
    soft_cap: float | None = None
    sink_score: float | None = None
    row_scale: Float[Tensor, " T"] | None = None
    row_shift: Float[Tensor, " T"] | None = None
    output_gate: Float[Tensor, "T #D"] | None = None
    output_map: RowMap | None = None

    @property
    def fixed_by_input(self) -> list[str]:
        """The slots that hold numbers computed from the hidden states and are held fixed."""
        names = ("row_scale", "row_shift", "output_gate")
        return [name for name in names if getattr(self, name) is not None]


@dataclass(frozen=True, kw_only=True)
class AttentionHead:
    """One head with its inputs in float64; a bias is the last row of its weight.

    Attributes:
        embed_dim: E, the width of the hidden states.
        query_input: ``[T, E]``, with one more column of ones where there is a bias.
        key_input: ``[S, E]``, likewise; value_input too.
        value_input: ``[S, E]``.
        q_weight: ``[E, D]``, or ``[E + 1, D]`` with the bias as its last row.
        k_weight: ``[E, D]``, likewise.
        v_weight: ``[E, Dv]``, likewise.
        scale: Factor on the dot product.
        visible: ``[T, S]``, True = may attend.
        attn_bias: ``[T, S]``, added to the scores, or None.
        form: How the head differs from plain softmax attention.
    """

    embed_dim: int
    query_input: Float[Tensor, "T Eq"]
    key_input: Float[Tensor, "S Ek"]
    value_input: Float[Tensor, "S Ev"]
    q_weight: Float[Tensor, "Eq D"]
    k_weight: Float[Tensor, "Ek D"]
    v_weight: Float[Tensor, "Ev Dv"]
    scale: float
    visible: Bool[Tensor, "T S"]
    attn_bias: Float[Tensor, "T S"] | None
    form: HeadForm

    def output(self, q_weight: Tensor, k_weight: Tensor, v_weight: Tensor) -> Tensor:
        """A as a function of the weights, plain and differentiable.

        Args:
            q_weight: In place of the head's own. Likewise the other two.
            k_weight: See ``q_weight``.
            v_weight: See ``q_weight``.

        Returns:
            ``[T, Dv]``; zero rows where a query may attend to nothing (unless the map says else).
        """
        return self._attend(
            self.query_input @ q_weight, self.key_input @ k_weight, self.value_input @ v_weight
        )

    def output_of_input(self, hidden_states: Float[Tensor, "T E"]) -> Float[Tensor, "T Dv"]:
        """A as a function of the hidden states of a self-attention, plain and differentiable.

        Args:
            hidden_states: ``[T, E]``, without the column of ones.

        Returns:
            ``[T, Dv]``.
        """
        weights = (self.q_weight, self.k_weight, self.v_weight)
        return self._attend(*(_append_ones(hidden_states, len(w)) @ w for w in weights))

    def _attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        form = self.form
        query = form.query_map(query) if form.query_map else query
        key = form.key_map(key) if form.key_map else key
        weighted = self.mix(softmax_rows(self, self.scale * query @ key.mT)) @ value
        weighted = form.output_map(weighted) if form.output_map else weighted
        return weighted if form.output_gate is None else weighted * form.output_gate

    def mix(self, probabilities: Float[Tensor, "T S"]) -> Float[Tensor, "T S"]:
        """The weights that multiply the values, given the softmax.

        Args:
            probabilities: The softmax, zero at hidden keys.

        Returns:
            ``row_scale probabilities + row_shift visible``; may be negative.
        """
        scale, shift = self.form.row_scale, self.form.row_shift
        mixed = probabilities if scale is None else scale[:, None] * probabilities
        return mixed if shift is None else mixed + shift[:, None] * self.visible


def softmax_rows(head: AttentionHead, scores: Float[Tensor, "T S"]) -> Float[Tensor, "T S"]:
    """Capped, biased, masked softmax with the head's sink, zero rows where nothing is visible.

    Args:
        head: Says cap, bias, mask and sink.
        scores: ``scale query key^T``.

    Returns:
        Values in [0, 1]; rows sum to one, to less with a sink, to zero without a visible key.
    """
    cap, sink = head.form.soft_cap, head.form.sink_score
    scores = scores if cap is None else cap * torch.tanh(scores / cap)
    scores = scores if head.attn_bias is None else scores + head.attn_bias
    scores = scores.masked_fill(~head.visible, -torch.inf)
    top = scores.detach().amax(-1, keepdim=True)
    top = top if sink is None else top.clamp_min(sink)
    top = torch.where(top.isfinite(), top, 0.0)
    powers = torch.exp(scores - top)
    total = powers.sum(-1, keepdim=True)
    total = total if sink is None else total + torch.exp(sink - top)
    return powers / torch.where(total > 0, total, 1.0)


def attention_head(
    hidden_states: Float[Tensor, "T E"],
    q_weight: Float[Tensor, "E D"],
    k_weight: Float[Tensor, "Ekv D"],
    v_weight: Float[Tensor, "Ekv Dv"],
    *,
    scale: float,
    q_bias: Float[Tensor, " D"] | None = None,
    k_bias: Float[Tensor, " D"] | None = None,
    v_bias: Float[Tensor, " Dv"] | None = None,
    attn_mask: Bool[Tensor, "T S"] | None = None,
    attn_bias: Float[Tensor, "T S"] | None = None,
    is_causal: bool = False,
    key_value_states: Float[Tensor, "S Ekv"] | None = None,
    form: HeadForm | None = None,
) -> AttentionHead:
    """Check one head and bring it to float64.

    Args:
        hidden_states: ``[T, E]``, finite: what feeds the query projection, and the other two
            unless ``key_value_states`` does.
        q_weight: ``[E, D]``, acts as ``hidden_states @ q_weight``.
        k_weight: ``[Ekv, D]``.
        v_weight: ``[Ekv, Dv]``.
        scale: Factor on the dot product.
        q_bias: ``[D]`` or None. A bias counts as one more row of its weight.
        k_bias: ``[D]`` or None.
        v_bias: ``[Dv]`` or None.
        attn_mask: ``[T, S]``, True = may attend.
        attn_bias: ``[T, S]``, added to the scores; values at or below ``finfo(dtype).min / 2``
            hide the key.
        is_causal: Hide later keys, aligned bottom-right; applies beside ``attn_mask``.
        key_value_states: ``[S, Ekv]``, what feeds keys and values of a cross-attention.
        form: How the head differs from plain softmax attention.

    Returns:
        The head.
    """
    key_states = hidden_states if key_value_states is None else key_value_states
    _check_shapes(hidden_states, key_states, q_weight, k_weight, v_weight)
    wide_q, query_input = _with_bias(hidden_states, q_weight, q_bias, "q_bias")
    wide_k, key_input = _with_bias(key_states, k_weight, k_bias, "k_bias")
    wide_v, value_input = _with_bias(key_states, v_weight, v_bias, "v_bias")
    mask = resolve_mask(
        hidden_states[None, None], key_states[None, None], attn_mask, attn_bias, is_causal
    )
    visible, wide_bias = _mask_and_bias(mask)
    return AttentionHead(
        embed_dim=hidden_states.shape[1],
        query_input=query_input,
        key_input=key_input,
        value_input=value_input,
        q_weight=wide_q,
        k_weight=wide_k,
        v_weight=wide_v,
        scale=float(scale),
        visible=visible,
        attn_bias=wide_bias,
        form=_checked_form(form or HeadForm(), len(hidden_states), v_weight.shape[1]),
    )


def _append_ones(states: Tensor, width: int) -> Tensor:
    """Append the column of ones that a weight with a bias row of ``width`` rows asks for."""
    if states.shape[1] == width:
        return states
    return torch.cat([states, states.new_ones(len(states), 1)], dim=1)


def _with_bias(
    states: Tensor, weight: Tensor, bias: Tensor | None, name: str
) -> tuple[Tensor, Tensor]:
    """Return weight and states in float64, the bias as a row of one against ones in the other."""
    wide, states = weight.detach().to(torch.float64), states.detach().to(torch.float64)
    if bias is None:
        return wide, states
    came = f"{name} {list(bias.shape)}, weight {list(weight.shape)}"
    require(bias.shape == weight.shape[1:], f"{name} must have one number a column", came)
    require(bool(bias.isfinite().all()), f"{name} must be finite", "a NaN or an infinity")
    wide = torch.cat([wide, bias.detach().to(wide)[None]])
    return wide, _append_ones(states, len(wide))


def _check_shapes(
    states: Tensor, key_states: Tensor, q_weight: Tensor, k_weight: Tensor, v_weight: Tensor
) -> None:
    """Raise unless states and weights are finite matrices of one head that fit together."""
    tensors = {
        "hidden_states": states,
        "key_value_states": key_states,
        "q_weight": q_weight,
        "k_weight": k_weight,
        "v_weight": v_weight,
    }
    require_float(**tensors)
    shapes = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in tensors.items())
    require(
        all(t.ndim == 2 and t.numel() > 0 for t in tensors.values()),
        "states and weights of one head must be matrices with entries",
        shapes,
        "hidden_states [T, E], q_weight [E, D], k_weight [E, D], v_weight [E, D]",
    )
    require(
        states.shape[1] == len(q_weight)
        and key_states.shape[1] == len(k_weight) == len(v_weight)
        and q_weight.shape[1] == k_weight.shape[1],
        "weights must act as hidden_states @ weight, and q_weight and k_weight share head_dim",
        shapes,
    )
    for name, tensor in tensors.items():
        bad = int((~tensor.isfinite()).sum())
        require(bad == 0, f"{name} must be finite", f"{bad} non-finite entries")


def _mask_and_bias(mask: AttentionMask) -> tuple[Tensor, Tensor | None]:
    """Who may attend to whom ``[T, S]``, and the finite part of the bias in float64."""
    size, visible, bias = (mask.num_queries, mask.num_keys), mask.visible(), mask.bias
    if visible is None:
        visible = torch.ones(size, dtype=torch.bool, device=mask.device)
    if bias is not None:
        bias = bias.detach().to(torch.float64).masked_fill(bias == -torch.inf, 0)
        bias = bias[0, 0].expand(size)
    return visible.reshape(visible.shape[-2:]).expand(size), bias


def _checked_form(form: HeadForm, num_queries: int, head_dim: int) -> HeadForm:
    """Return the form with its tensors in float64, or refuse their shapes."""
    valid = {
        "row_scale": [(num_queries,)],
        "row_shift": [(num_queries,)],
        "output_gate": [(num_queries, head_dim), (num_queries, 1)],
    }
    cap = form.soft_cap
    require(cap is None or cap > 0, "soft_cap must be positive", f"soft_cap={cap}")
    changed = {}
    for name in form.fixed_by_input:
        tensor = getattr(form, name)
        shapes = " or ".join(str(list(shape)) for shape in valid[name])
        fits = tuple(tensor.shape) in valid[name] and bool(tensor.isfinite().all())
        require(fits, f"{name} must be finite and {shapes}", f"{name} {list(tensor.shape)}")
        changed[name] = tensor.detach().to(torch.float64)
    return replace(form, **changed)
