"""What a user is told when something does not fit: what must hold, what came, what is valid."""

import pytest
import torch

import levelhead as lh

E, H, D = 12, 3, 4


def inner(variant="softmax", **options):
    return lh.InnerAttention(variant, embed_dim=E, num_heads=H, **options).eval()


def qkv(num_queries=5, num_keys=7, num_heads=H, head_dim=D):
    return (
        torch.randn(2, num_heads, num_queries, head_dim),
        torch.randn(2, num_heads, num_keys, head_dim),
        torch.randn(2, num_heads, num_keys, head_dim),
    )


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: lh.Attention(64, 5), "num_heads must divide embed_dim, got num_heads=5, embed_dim=64"),
        (lambda: lh.Attention(12, 3, num_kv_heads=2), "num_kv_heads must divide num_heads, got num_kv_heads=2"),
        (lambda: lh.Attention(12, 3, num_kv_heads=0), "num_kv_heads must divide num_heads, got num_kv_heads=0"),
        (lambda: lh.Attention(12, 0), "num_heads must divide embed_dim, got num_heads=0"),
        (lambda: lh.Attention(12, 3, head_dim=-1), "sizes must be positive, got embed_dim=12, head_dim=-1"),
        (lambda: lh.Attention(12, 3, dropout_p=1.0), r"dropout_p must be in \[0, 1\), got dropout_p=1.0"),
        (lambda: lh.Attention(12, 3, scale=float("nan")), "scale must be finite, got scale=nan"),
        (lambda: lh.Attention(12.0, 3), "embed_dim must be an integer, got embed_dim=12.0"),
        (lambda: lh.Attention(12, 3, num_kv_heads=True + 0.5), "num_kv_heads must be an integer, got num_kv_heads=1.5"),
        (lambda: lh.Attention(12, 3, dtype=torch.int32), "dtype must be floating-point, got dtype=torch.int32"),
        (lambda: inner("spectral"), "act on q, k and v projections.*levelhead.Attention, or levelhead.convert"),
    ],
)  # fmt: skip
def test_construction(build, words):
    with pytest.raises(ValueError, match=words):
        build()


@pytest.mark.parametrize(
    ("call", "words"),
    [
        ({"attn_mask": torch.zeros(5, 7)}, "attn_mask must be boolean with True = may attend.*goes to attn_bias"),
        ({"attn_mask": torch.ones(5, 6, dtype=torch.bool)}, r"attn_mask must be broadcastable to \[B, H, T, S\] = \[2, 3, 5, 7\], got attn_mask of shape \[5, 6\].*attn_mask\[:, None, None, :\]"),
        ({"attn_mask": torch.ones(2, 5, 7, dtype=torch.bool)}, "two or four axes|four axes, each of size 1 or full"),
        ({"attn_mask": [[True]]}, "attn_mask must be boolean.*got attn_mask=list"),
        ({"attn_bias": torch.ones(5, 7, dtype=torch.bool)}, "attn_bias must be a float tensor.*goes to attn_mask"),
        ({"attn_bias": torch.full((5, 7), torch.nan)}, "attn_bias may hold finite numbers and -inf, got a maximum of nan"),
        ({"attn_bias": torch.full((5, 7), torch.inf)}, "attn_bias may hold finite numbers and -inf, got a maximum of inf"),
        ({"token_mask": torch.ones(2, 4, dtype=torch.bool)}, r"token_mask must be boolean \[B, T\] = \[2, 5\]"),
        ({"token_mask": torch.ones(2, 5)}, "token_mask must be boolean"),
        ({"attn_mask": torch.ones(5, 7, dtype=torch.bool, device="meta")}, "attn_mask must be on the device of the query, got attn_mask on meta, query on cpu"),
        ({"attn_bias": torch.ones(5, 7, device="meta")}, "attn_bias must be on the device of the query, got attn_bias on meta"),
        ({"token_mask": torch.ones(2, 5, dtype=torch.bool, device="meta")}, "token_mask must be on the device of the query, got token_mask on meta"),
        ({"scale": float("nan")}, "scale must be finite, got scale=nan"),
        ({"scale": float("inf")}, "scale must be finite, got scale=inf"),
        ({"dropout_p": -0.5}, r"dropout_p must be in \[0, 1\), got dropout_p=-0.5"),
        ({"dropout_p": 1.0}, r"dropout_p must be in \[0, 1\), got dropout_p=1.0"),
        ({"dropout_p": float("nan")}, r"dropout_p must be in \[0, 1\), got dropout_p=nan"),
    ],
)  # fmt: skip
def test_masks(call, words):
    with pytest.raises(ValueError, match=words):
        inner()(*qkv(), **call)


def test_one_nan_among_numbers_is_found():
    bias = torch.zeros(5, 7)
    bias[3, 2] = torch.nan
    bias[0, 0] = -torch.inf
    with pytest.raises(ValueError, match="got a maximum of nan"):
        inner()(*qkv(), attn_bias=bias)


def test_more_queries_than_keys_under_causality():
    with pytest.raises(ValueError, match="queries may not outnumber keys, got T=7, S=5"):
        inner()(*qkv(7, 5), is_causal=True)
    with pytest.raises(ValueError, match="queries may not outnumber keys"):
        lh.sliding_window_mask(7, 5, 2)
    with pytest.raises(ValueError, match="window must be positive, got window=0"):
        lh.sliding_window_mask(5, 7, 0)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda q, k, v: (q[0], k, v), r"must have four axes \[B, H, T, D\], got query \[3, 5, 4\]"),
        (lambda q, k, v: (q[:1], k, v), "must share the batch size"),
        (lambda q, k, v: (q, k, v[:, :, :3]), "key and value must share heads and length"),
        (lambda q, k, v: (q, k[..., :3], v), "query and key must share head_dim"),
        (lambda q, k, v: (q, k[:, :2], v[:, :2]), "the key heads must divide the query heads"),
        (lambda q, k, v: (q.double(), k, v), "must share one floating-point dtype, got query .* torch.float64"),
        (lambda q, k, v: (q.long(), k.long(), v.long()), "must share one floating-point dtype"),
        (lambda q, k, v: (q[:, :1], k[:, :1], v[:, :1]), r"must have the heads and head_dim this attention was built for.*valid: \[B, 3, T, 4\]"),
    ],
)  # fmt: skip
def test_query_key_value(change, words):
    with pytest.raises(ValueError, match=words):
        inner()(*change(*qkv()))


@pytest.mark.parametrize("variant", ["affine", "gate"])
def test_hidden_states(variant):
    words = r"reads hidden_states, the input of the attention, got hidden_states={}.*valid: a float tensor \[2, 5, 12\]"
    with pytest.raises(ValueError, match=words.format("NoneType None")):
        inner(variant)(*qkv())
    with pytest.raises(ValueError, match=words.format(r"Tensor\[2, 4, 12\]")):
        inner(variant)(*qkv(), torch.randn(2, 4, E))
    layer = lh.Attention(E, H, variant=variant).eval()
    with pytest.raises(
        ValueError,
        match=r"hidden_states must be \[B, T, 12\], got hidden_states=Tensor\[2, 5, 11\]",
    ):
        layer(torch.randn(2, 5, 11))
    with pytest.raises(ValueError, match=words.format(r"Tensor\[2, 5, 12\] of torch.int64")):
        inner(variant)(*qkv(), torch.ones(2, 5, E, dtype=torch.int64))
    with pytest.raises(ValueError, match="hidden_states must be a floating-point tensor, got"):
        layer(torch.ones(2, 5, E, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"context must be \[B, T, 12\]"):
        layer(torch.randn(2, 5, E), torch.randn(5, E))


def test_a_gate_for_each_coordinate_of_values_of_another_width():
    query, key, value = qkv()
    hidden_states = torch.randn(2, 5, E)
    words = r"one number per head, or per coordinate of each head's output, got gate_logits=Tensor\[2, 5, 12\]"
    with pytest.raises(ValueError, match=words):
        inner("gate")(query, key, value[..., :3], hidden_states)
    headwise = inner("gate(granularity='headwise')")
    assert headwise(query, key, value[..., :3], hidden_states).shape == (2, H, 5, 3)
