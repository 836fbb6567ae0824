"""What a mask knows of its bias, and what it copies for that."""

import pytest
import torch

from levelhead.stages.masks import resolve_mask

T = 7


def tokens(dtype=torch.float32):
    return torch.randn(2, 3, T, 5, dtype=dtype), torch.randn(2, 3, T, 5, dtype=dtype)


def test_a_bias_that_forbids_nothing_is_kept_as_it_is():
    bias = torch.randn(1, 3, T, T, requires_grad=True)
    mask = resolve_mask(*tokens(), attn_bias=bias)
    assert mask.bias_forbids is False
    assert mask.bias.data_ptr() == bias.data_ptr()
    assert mask.without_finite_bias().bias is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("says_no", [-torch.inf, torch.finfo(torch.float16).min])
def test_a_bias_that_forbids_holds_minus_infinity_there(dtype, says_no):
    bias = torch.randn(1, 3, T, T, dtype=torch.float16)
    bias[0, 1, 2, 3] = says_no
    mask = resolve_mask(*tokens(dtype), attn_bias=bias)
    assert mask.bias_forbids is True
    expected = bias.clone()
    expected[0, 1, 2, 3] = -torch.inf
    assert mask.bias.equal(expected)
    assert bias[0, 1, 2, 3] == says_no
    assert mask.without_finite_bias() is mask
    assert not mask.visible()[0, 1, 2, 3]


def test_rows_of_a_bias_that_forbids_elsewhere_are_looked_at_again():
    bias = torch.randn(1, 3, T, T)
    bias[0, :, 0, 3] = -torch.inf
    mask = resolve_mask(*tokens(), attn_bias=bias)
    first, rest = mask.rows(0, 2), mask.rows(2, T)
    assert first.without_finite_bias().bias is not None
    assert rest.without_finite_bias().bias is None
    finite = resolve_mask(*tokens(), attn_bias=torch.zeros(1, 1, T, T))
    assert finite.rows(2, T).bias_forbids is False


def test_the_mask_of_the_keys_keeps_what_is_known_of_the_bias():
    bias = torch.zeros(1, 1, 1, T)
    bias[..., 2] = -torch.inf
    keys = resolve_mask(*tokens(), attn_bias=bias, is_causal=True).keys()
    assert (keys.num_queries, keys.is_causal, keys.bias_forbids) == (1, False, True)
    assert keys.visible().flatten().tolist() == [i != 2 for i in range(T)]


def test_nobody_looks_at_a_bias_while_compiling():
    bias = torch.randn(1, 3, T, T)

    def seen(query, key, bias):
        mask = resolve_mask(query, key, attn_bias=bias)
        assert mask.bias_forbids is None
        return mask.bias

    compiled = torch.compile(seen, backend="eager", fullgraph=True)
    assert compiled(*tokens(), bias).equal(bias)
