"""Conditioning of the attention Jacobian: how evenly the output answers to weights or input.

    J = [dA/dW_Q, dA/dW_K, dA/dW_V]  of shape  (T Dv) x (3 E D)     for wrt="weights"
    J = dA/dX                        of shape  (T Dv) x (T E)       for wrt="input"

kappa is taken over the non-zero singular values, those above ``max(shape) * eps * sigma_max`` in
float64. Everything is computed in float64 whatever came in, and no gradient flows out.

Source: Saratchandran & Lucey 2025 and 2026 (arXiv 2603.07162 and 2603.27153) for the quantity;
the Gram structure that makes it fast is derived in `levelhead.measure.linearise`.
"""

from collections.abc import Callable, Sequence

from jaxtyping import Bool, Float
from torch import Tensor

from levelhead.measure.conditioning import (
    Conditioning,
    by_autograd,
    by_dense,
    by_lanczos,
    by_matrix_free,
)
from levelhead.measure.gram import input_gram, input_jacobian, weight_gram, weight_jacobian
from levelhead.measure.head import AttentionHead, HeadForm, attention_head
from levelhead.measure.linearise import linearise
from levelhead.measure.operators import (
    FunctionJacobian,
    InputJacobian,
    JacobianOperator,
    JacobianProblem,
    WeightJacobian,
)
from levelhead.shapes import require, require_divides, require_known

_METHODS = ("auto", "dense", "lanczos", "matrix_free", "autograd")
_WRT = ("weights", "input")
# All eigenvalues of a matrix of this size take seconds on two cores.
_DENSE_ROWS = 2500
# What Lanczos may hold: one square float64 matrix of 22,360 rows.
_LANCZOS_BYTES = 4_000_000_000
_FLOAT64_BYTES = 8


def jacobian_condition(
    hidden_states: Float[Tensor, "T E"],
    q_weight: Float[Tensor, "E D"],
    k_weight: Float[Tensor, "Ekv D"],
    v_weight: Float[Tensor, "Ekv Dv"],
    *,
    scale: float,
    attn_mask: Bool[Tensor, "#T #S"] | None = None,
    method: str = "auto",
    wrt: str = "weights",
    attn_bias: Float[Tensor, "#T #S"] | None = None,
    is_causal: bool = False,
    q_bias: Float[Tensor, " D"] | None = None,
    k_bias: Float[Tensor, " D"] | None = None,
    v_bias: Float[Tensor, " Dv"] | None = None,
    key_value_states: Float[Tensor, "S Ekv"] | None = None,
    form: HeadForm | None = None,
) -> Conditioning:
    """Condition number of the Jacobian of one head.

    Args:
        hidden_states: ``[T, E]``, what feeds the projections.
        q_weight: ``[E, D]``, acts as ``hidden_states @ q_weight``; a bias given beside it counts
            among the weights.
        k_weight: ``[E, D]``.
        v_weight: ``[E, Dv]``.
        scale: Factor on the dot product.
        attn_mask: ``[T, S]``, True = may attend.
        method: "dense" (all eigenvalues of J J^T), "lanczos" (its two ends, one matrix of the
            size of J J^T in memory), "matrix_free" (sigma_max, and a lower bound on kappa),
            "autograd" (J itself by autograd, slow), or "auto": the first that fits.
        wrt: "weights" or "input".
        attn_bias: ``[T, S]``, added to the scores.
        is_causal: Hide later keys, aligned bottom-right.
        q_bias: ``[D]`` or None. Likewise the other two.
        k_bias: ``[D]`` or None.
        v_bias: ``[Dv]`` or None.
        key_value_states: ``[S, Ekv]``, what feeds keys and values of a cross-attention.
        form: Rotary embeddings, q and k norms and every variant: see `HeadForm`.

    Returns:
        Kappa with its convention, see `Conditioning`.
    """
    require_known("method", method, _METHODS)
    require_known("wrt", wrt, _WRT)
    head = attention_head(
        hidden_states,
        q_weight,
        k_weight,
        v_weight,
        scale=scale,
        q_bias=q_bias,
        k_bias=k_bias,
        v_bias=v_bias,
        attn_mask=attn_mask,
        attn_bias=attn_bias,
        is_causal=is_causal,
        key_value_states=key_value_states,
        form=form,
    )
    if wrt == "input":
        _require_function_of_input(head, key_value_states)
    if method == "autograd":
        return by_autograd(_plain_operator(head, wrt))
    return _solve(_head_problem(head, wrt), method)


def jacobian_conditions(
    hidden_states: Float[Tensor, "T E"],
    q_weight: Float[Tensor, "E HD"],
    k_weight: Float[Tensor, "Ekv HkvD"],
    v_weight: Float[Tensor, "Ekv HkvD"],
    *,
    num_heads: int,
    num_kv_heads: int | None = None,
    forms: Sequence[HeadForm] | None = None,
    q_bias: Float[Tensor, " HD"] | None = None,
    k_bias: Float[Tensor, " HkvD"] | None = None,
    v_bias: Float[Tensor, " HkvD"] | None = None,
    **options,
) -> list[Conditioning]:
    """`jacobian_condition` of every head of one layer, in the logical layout of its weights.

    Args:
        hidden_states: ``[T, E]``.
        q_weight: ``[E, H D]``; head h owns columns ``h D .. (h + 1) D``.
        k_weight: ``[E, Hkv D]``; a key head serves ``H / Hkv`` query heads in a row.
        v_weight: ``[E, Hkv D]``.
        num_heads: H.
        num_kv_heads: Hkv; H unless given.
        forms: One form a head, or None for plain heads.
        q_bias: ``[H D]`` or None. Likewise the other two.
        k_bias: ``[Hkv D]`` or None.
        v_bias: ``[Hkv D]`` or None.
        options: The other arguments of `jacobian_condition`, the same for all heads.

    Returns:
        One result a query head.
    """
    kv_heads = num_heads if num_kv_heads is None else num_kv_heads
    require_divides("num_kv_heads", kv_heads, "num_heads", num_heads)
    forms = [HeadForm()] * num_heads if forms is None else forms
    came = f"{len(forms)} forms, num_heads={num_heads}"
    require(len(forms) == num_heads, "forms must hold one form a head", came)
    group = num_heads // kv_heads
    queries = _split_heads(num_heads, q_weight=q_weight, q_bias=q_bias)
    keys = _split_heads(kv_heads, k_weight=k_weight, k_bias=k_bias)
    values = _split_heads(kv_heads, v_weight=v_weight, v_bias=v_bias)
    return [
        jacobian_condition(
            hidden_states,
            form=forms[head],
            **queries[head],
            **keys[head // group],
            **values[head // group],
            **options,
        )
        for head in range(num_heads)
    ]


def operator_condition(
    function: Callable[..., Tensor],
    inputs: Sequence[Tensor],
    *,
    method: str = "auto",
) -> Conditioning:
    """Condition number of the Jacobian of any differentiable function, by exact products with it.

    For what has no known structure: a whole layer, a variant of your own, an affine or gated head
    to its input.

    Args:
        function: Takes the tensors of ``inputs`` in float64 and returns one float64 tensor.
        inputs: Finite tensors; J holds the derivatives to all their entries, flattened.
        method: "autograd" (J itself and its singular values), "matrix_free" (a lower bound), or
            "auto": "autograd" where J has at most 2,500 rows or columns.

    Returns:
        Kappa with its convention, see `Conditioning`.
    """
    require_known("method", method, ("auto", "autograd", "matrix_free"))
    for index, tensor in enumerate(inputs):
        finite = bool(tensor.isfinite().all())
        require(finite, f"inputs[{index}] must be finite", "a NaN or an infinity")
    operator = FunctionJacobian(function, inputs)
    small = min(operator.shape) <= _DENSE_ROWS and _fits(operator.shape)
    if method == "autograd" or (method == "auto" and small):
        return by_autograd(operator)
    return by_matrix_free(operator)


def _solve(problem: JacobianProblem, method: str) -> Conditioning:
    """Run the method asked for, or the first that fits."""
    rows, columns = problem.operator.shape
    if method == "auto":
        method = "matrix_free"
        if _fits((rows, rows)):
            method = "lanczos"
        if min(rows, columns) <= _DENSE_ROWS and _fits((rows, min(rows, columns))):
            method = "dense"
    if method == "matrix_free":
        return by_matrix_free(problem.operator)
    return by_dense(problem) if method == "dense" else by_lanczos(problem)


def _fits(shape: tuple[int, int]) -> bool:
    return shape[0] * shape[1] * _FLOAT64_BYTES <= _LANCZOS_BYTES


def _head_problem(head: AttentionHead, wrt: str) -> JacobianProblem:
    """The Jacobian of a head in the three forms, by structure."""
    linear = linearise(head)
    if wrt == "input":
        return JacobianProblem(
            InputJacobian(linear),
            gram=lambda: input_gram(linear),
            dense=lambda: input_jacobian(linear, compress=True),
        )
    return JacobianProblem(
        WeightJacobian(linear),
        gram=lambda: weight_gram(linear),
        dense=lambda: weight_jacobian(linear, compress=True),
    )


def _plain_operator(head: AttentionHead, wrt: str) -> JacobianOperator:
    """The Jacobian of a head by autograd through the plain function, no structure used."""
    if wrt == "input":
        return FunctionJacobian(head.output_of_input, [head.query_input[:, : head.embed_dim]])
    return FunctionJacobian(head.output, [head.q_weight, head.k_weight, head.v_weight])


def _require_function_of_input(head: AttentionHead, key_value_states: Tensor | None) -> None:
    """Refuse ``wrt="input"`` where holding something fixed would give another Jacobian."""
    remedy = "operator_condition with the whole function of the hidden states"
    fixed = head.form.fixed_by_input
    came = f"fixed numbers in {', '.join(fixed)}"
    require(not fixed, "wrt='input' needs every slot as a function of the input", came, remedy)
    came = "key_value_states"
    require(key_value_states is None, "wrt='input' is for self-attention", came, remedy)


def _split_heads(num_heads: int, **tensors: Tensor | None) -> list[dict[str, Tensor | None]]:
    """One dict of the same names for each head, its columns of every tensor."""
    heads: list[dict[str, Tensor | None]] = [{} for _ in range(num_heads)]
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        require_divides("the number of heads", num_heads, f"{name}'s columns", tensor.shape[-1])
        for head, part in zip(heads, tensor.chunk(num_heads, dim=-1), strict=True):
            head[name] = part
    return heads
