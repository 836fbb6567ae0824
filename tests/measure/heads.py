"""Random heads for the tests of the Jacobian, and its oracle by plain autograd."""

import torch

from levelhead.measure.head import HeadForm
from levelhead.rows import unit_rows


def random_head(tokens=7, embed_dim=11, head_dim=5, value_dim=None, keys=None, gain=0.6, seed=0):
    """Hidden states and q, k, v weights of one head, float64."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    value_dim = head_dim if value_dim is None else value_dim
    weights = [normal(embed_dim, size) * gain for size in (head_dim, head_dim, value_dim)]
    return normal(tokens, embed_dim), *weights


def rotary(rows):
    """Rotate the first two pairs of each row by an angle that grows with its position."""
    frequencies = torch.tensor([1.0, 0.3], dtype=rows.dtype)
    angle = torch.arange(len(rows), dtype=rows.dtype)[:, None] * frequencies
    first, second, rest = rows.split([2, 2, rows.shape[1] - 4], dim=1)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=1)


def rms_norm_with_gain(rows):
    """A q or k norm with learned gains, as Llama-like models have."""
    gain = torch.linspace(0.5, 1.5, rows.shape[1], dtype=rows.dtype)
    return gain * rows * torch.rsqrt(rows.square().mean(1, keepdim=True) + 1e-6)


def forms(tokens=7, head_dim=5):
    """One form for each slot, and one that uses them all."""
    generator = torch.Generator().manual_seed(1)
    rates = torch.rand(3, tokens, generator=generator)
    gate = torch.rand(tokens, head_dim, generator=generator)
    return {
        "plain": HeadForm(),
        "quest": HeadForm(key_map=unit_rows),
        "qknorm": HeadForm(query_map=unit_rows, key_map=unit_rows),
        "gains": HeadForm(query_map=rms_norm_with_gain, key_map=rms_norm_with_gain),
        "rotary": HeadForm(query_map=rotary, key_map=rotary),
        "query norm": HeadForm(query_map=unit_rows),
        "soft_cap": HeadForm(soft_cap=1.5),
        "off_by_one": HeadForm(sink_score=0.0),
        "sink": HeadForm(sink_score=1.3),
        "affine": HeadForm(row_scale=rates[0], row_shift=rates[1] - 0.5),
        "precondition": HeadForm(output_map=unit_rows),
        "elementwise gate": HeadForm(output_gate=gate),
        "headwise gate": HeadForm(output_gate=rates[2][:, None]),
        "all": HeadForm(
            query_map=lambda rows: rotary(unit_rows(rows)),
            key_map=lambda rows: rotary(rms_norm_with_gain(rows)),
            soft_cap=2.0,
            sink_score=0.1,
            row_scale=rates[0],
            row_shift=rates[1],
            output_map=unit_rows,
            output_gate=gate,
        ),
    }


def autograd_weight_jacobian(head):
    """J of ``AttentionHead.output`` to its flattened weights, by torch's own routine."""
    weights = (head.q_weight, head.k_weight, head.v_weight)
    parts = torch.autograd.functional.jacobian(head.output, weights)
    return torch.cat([part.flatten(2) for part in parts], dim=2).flatten(0, 1)


def autograd_input_jacobian(head):
    """J of ``AttentionHead.output_of_input`` to the flattened hidden states."""
    states = head.query_input[:, : head.embed_dim]
    return (
        torch.autograd.functional.jacobian(head.output_of_input, states).flatten(2).flatten(0, 1)
    )


def kappa_and_rank(jacobian):
    """kappa over the non-zero singular values, and their number, from J itself."""
    values = torch.linalg.svdvals(jacobian)
    kept = values[values > max(jacobian.shape) * torch.finfo(values.dtype).eps * values[0]]
    return float(kept[0] / kept[-1]), len(kept)
