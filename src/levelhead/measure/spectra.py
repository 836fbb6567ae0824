"""Spectra of the projections of one attention: per head first, the fused matrices beside them.

A random E x D block of one head is well-conditioned by itself (Marchenko-Pastur) while the fused
E x (H D) matrix need not be, so the two are never mixed up here: `AttentionSpectra` holds the
heads, its ``fused`` the whole matrices.
"""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from levelhead.linalg import condition_of, singular_values
from levelhead.measure.head_weights import HeadWeights, split_heads
from levelhead.shapes import at_least_float32


@dataclass(frozen=True)
class MatrixSpectra:
    """What the singular values sigma of a batch of matrices say; NaN for one that is not finite.

    Attributes:
        kappa: Over all singular values (a product of two factors of width D has D), inf where the
            matrix is rank-deficient.
        kappa_nonzero: Over the non-zero singular values.
        spectral_norm: Largest sigma.
        stable_rank: ``sum sigma^2 / max sigma^2``, in [1, rank]; 0 for the zero matrix.
        effective_rank: ``exp(entropy(sigma / sum sigma))``, in [1, rank]; 0 for the zero matrix
            (Roy & Vetterli 2007).
        rank: Numerical rank at the eps of the dtype that came in.
        status: `levelhead.linalg.Status` of each matrix.
        alignment: Cosine with the identity, ``sum diag / (||.||_F sqrt(number of diagonal
            entries))``, in [-1, 1]: mimetic initialisation makes it positive for q k products and
            negative for v o ones. Only for products, else None; 0 for the zero matrix.
    """

    kappa: Float[Tensor, "*heads"]
    kappa_nonzero: Float[Tensor, "*heads"]
    spectral_norm: Float[Tensor, "*heads"]
    stable_rank: Float[Tensor, "*heads"]
    effective_rank: Float[Tensor, "*heads"]
    rank: Int[Tensor, "*heads"]
    status: Int[Tensor, "*heads"]
    alignment: Float[Tensor, "*heads"] | None = None


@dataclass(frozen=True)
class FusedSpectra:
    """The whole matrices of one attention, all heads at once; scalars.

    Attributes:
        q: ``[E, H D]``.
        k: ``[Ekv, Hkv D]``.
        v: ``[Ekv, Hkv D]``.
        o: ``[H D, E]``, or None.
        vo: ``W_V W_O``, the sum over heads of their products, or None.
    """

    q: MatrixSpectra
    k: MatrixSpectra
    v: MatrixSpectra
    o: MatrixSpectra | None
    vo: MatrixSpectra | None


@dataclass(frozen=True)
class AttentionSpectra:
    """Spectra of one attention, one number a head.

    Attributes:
        q: ``W_Q^h``, H of them.
        k: ``W_K^h``, Hkv.
        v: ``W_V^h``, Hkv.
        o: ``W_O^h``, H, or None where there is no output projection.
        qk: ``W_Q^h W_K^hT``, H.
        vo: ``W_V^h W_O^h``, H, or None.
        fused: The whole matrices.
    """

    q: MatrixSpectra
    k: MatrixSpectra
    v: MatrixSpectra
    o: MatrixSpectra | None
    qk: MatrixSpectra
    vo: MatrixSpectra | None
    fused: FusedSpectra


def matrix_spectra(
    matrix: Float[Tensor, "*heads rows cols"], precision: torch.dtype | None = None
) -> MatrixSpectra:
    """Condition, norm and ranks of each matrix; never an exception for its values.

    Args:
        matrix: Any batch shape; may hold NaN and inf.
        precision: The dtype whose eps says what counts as zero; the matrix' own unless given.

    Returns:
        Float64 numbers, one set a matrix.
    """
    spectrum = singular_values(matrix, precision)
    condition, values = condition_of(spectrum), spectrum.values
    return MatrixSpectra(
        kappa=condition.kappa,
        kappa_nonzero=condition.kappa_nonzero,
        spectral_norm=condition.sigma_max,
        stable_rank=stable_rank(values),
        effective_rank=effective_rank(values),
        rank=condition.rank,
        status=condition.status,
    )


def attention_spectra(
    q_weight: Float[Tensor, "E HD"],
    k_weight: Float[Tensor, "Ekv HkvD"],
    v_weight: Float[Tensor, "Ekv HkvD"],
    o_weight: Float[Tensor, "HD E"] | None = None,
    *,
    num_heads: int,
    num_kv_heads: int | None = None,
) -> AttentionSpectra:
    """Spectra of q, k, v, o and of the q k and v o products, per head and fused.

    Args:
        q_weight: ``[E, H D]``, acts as ``hidden_states @ q_weight``.
        k_weight: ``[Ekv, Hkv D]``.
        v_weight: ``[Ekv, Hkv D]``.
        o_weight: ``[H D, E]``, or None.
        num_heads: H.
        num_kv_heads: Hkv; H unless given. Products pair each query head with its key head.

    Returns:
        One set of numbers a head, and one for each whole matrix; a head that is not finite costs
        its neighbours nothing.
    """
    heads = split_heads(q_weight, k_weight, v_weight, o_weight, num_heads, num_kv_heads)
    precision = at_least_float32(q_weight.dtype)
    key, value, output = heads.repeated(heads.key), heads.repeated(heads.value), heads.output
    return AttentionSpectra(
        q=matrix_spectra(heads.query, precision),
        k=matrix_spectra(heads.key, precision),
        v=matrix_spectra(heads.value, precision),
        o=None if output is None else matrix_spectra(output, precision),
        qk=_product_spectra(heads.query, key.mT, precision),
        vo=None if output is None else _product_spectra(value, output, precision),
        fused=_fused_spectra(heads, precision),
    )


def stable_rank(values: Float[Tensor, "*batch K"]) -> Float[Tensor, "*batch"]:
    """``sum sigma^2 / max sigma^2``: how many directions carry the energy.

    Args:
        values: Singular values.

    Returns:
        Values in [1, K]; 0 where all are zero, NaN where one is not finite.
    """
    largest = values.amax(-1, keepdim=True)
    relative = values / torch.where(largest == 0, 1.0, largest)
    return relative.square().sum(-1)


def effective_rank(values: Float[Tensor, "*batch K"]) -> Float[Tensor, "*batch"]:
    """``exp(-sum p ln p)`` with ``p = sigma / sum sigma``: how many directions are in use.

    Args:
        values: Singular values.

    Returns:
        Values in [1, K]; 0 where all are zero, NaN where one is not finite.

    Source: Roy & Vetterli 2007, "The effective rank". Differs from it in: nothing.
    """
    total = values.sum(-1, keepdim=True)
    shares = values / torch.where(total == 0, 1.0, total)
    entropy = -torch.xlogy(shares, shares).sum(-1)
    return torch.where(total[..., 0] == 0, 0.0, entropy.exp())


def _product_spectra(
    left: Float[Tensor, "*heads rows D"],
    right: Float[Tensor, "*heads D cols"],
    precision: torch.dtype,
) -> MatrixSpectra:
    """Spectra of ``left @ right`` over its D singular values, without forming it."""
    core = left @ right
    if left.shape[-1] < min(left.shape[-2], right.shape[-1]):
        core = _triangle(left) @ _triangle(right.mT).mT
    spectra = matrix_spectra(core, precision)
    trace_size = min(left.shape[-2], right.shape[-1])
    trace = (left[..., :trace_size, :] * right[..., :trace_size].mT).sum((-2, -1))
    frobenius = torch.linalg.matrix_norm(core)
    alignment = trace / torch.where(frobenius == 0, 1.0, frobenius) / trace_size**0.5
    return replace(spectra, alignment=alignment)


def _triangle(matrix: Tensor) -> Tensor:
    """R of ``matrix = Q R``; NaN where the matrix is not finite."""
    finite = matrix.isfinite().all(-1).all(-1)[..., None, None]
    triangle = torch.linalg.qr(torch.where(finite, matrix, 0.0), mode="r").R
    return torch.where(finite, triangle, torch.nan)


def _fused_spectra(heads: HeadWeights, precision: torch.dtype) -> FusedSpectra:
    """Spectra of the whole matrices."""
    side_by_side = [_columns(weight) for weight in (heads.query, heads.key, heads.value)]
    q, k, v = (matrix_spectra(matrix, precision) for matrix in side_by_side)
    if heads.output is None:
        return FusedSpectra(q, k, v, None, None)
    output = heads.output.flatten(0, 1)
    vo = _product_spectra(_columns(heads.repeated(heads.value)), output, precision)
    return FusedSpectra(q, k, v, matrix_spectra(output, precision), vo)


def _columns(by_head: Tensor) -> Tensor:
    """``[H, E, D]`` back as ``[E, H D]``."""
    return by_head.movedim(0, 1).flatten(1)
