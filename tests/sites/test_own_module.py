"""A module of one's own, converted by the recipe of docs/own_module.md."""

import copy

import pytest
import torch
from converting import randomise
from torch import nn

from levelhead.convert import convert, restore
from levelhead.sites.layout import Layout, fused, linear
from levelhead.sites.sites import AttentionSite
from levelhead.sites.swap_host import SwapHost
from levelhead.verify import verify
from levelhead.verify_report import VerificationError

E, H, B, T = 30, 5, 2, 7


class CausalSelfAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(E, 3 * E), nn.Linear(E, E)
        self.n_head = H

    def heads(self, x):
        parts = self.c_attn(x).split(E, dim=2)
        return [part.unflatten(2, (self.n_head, -1)).transpose(1, 2) for part in parts]

    def forward(self, x):
        y = nn.functional.scaled_dot_product_attention(*self.heads(x), is_causal=True)
        return self.c_proj(y.transpose(1, 2).flatten(2))


class Converted(nn.Module):
    def forward(self, x):
        y = self.levelhead(*self.heads(x), x, is_causal=True)
        return self.c_proj(y.transpose(1, 2).flatten(2))


class WithoutItsMask(nn.Module):
    def forward(self, x):
        y = self.levelhead(*self.heads(x), x)
        return self.c_proj(y.transpose(1, 2).flatten(2))


def reader(forward_class):
    def read(name, module, model):
        if not isinstance(module, CausalSelfAttention):
            return None
        q, k, v = fused(module.c_attn, E, E, E)
        return AttentionSite(
            name=name, module=module, layout=Layout(q, k, v, linear(module.c_proj)),
            num_heads=H, scale=(E // H) ** -0.5, is_causal=True, host=SwapHost(forward_class),
        )  # fmt: skip

    return read


READERS = [reader(Converted)]


def pair():
    torch.manual_seed(0)
    stock = randomise(nn.Sequential(CausalSelfAttention(), CausalSelfAttention()).double())
    return stock, copy.deepcopy(stock), torch.randn(B, T, E, dtype=torch.double)


@pytest.mark.parametrize("variant", ["softmax", "spectral(strength=0)", "sigma_reparam"])
def test_neutral_equals_the_module_itself(variant):
    stock, model, hidden = pair()
    convert(model, variant, readers=READERS)
    torch.testing.assert_close(model(hidden), stock(hidden), rtol=0, atol=1e-10)


@pytest.mark.parametrize("variant", ["quest", "affine + gate", "sink", "spectral"])
def test_it_is_verified_and_comes_back(variant):
    stock, model, hidden = pair()
    convert(model, variant, readers=READERS)
    checks = {check.name: check.status for check in verify(model, hidden, readers=READERS).checks}
    assert [checks[name] for name in ("parity", "scale", "mask leak", "on path")] == ["passed"] * 4
    assert isinstance(model[0], CausalSelfAttention)
    restore(model, readers=READERS)
    assert type(model[0]) is CausalSelfAttention
    assert list(model.state_dict()) == list(stock.state_dict())
    assert torch.equal(model(hidden), stock(hidden))


def test_a_forward_that_forgets_the_mask_is_found():
    _, model, hidden = pair()
    readers = [reader(WithoutItsMask)]
    convert(model, "quest", readers=readers)
    with pytest.raises(VerificationError, match=r"failed \(parity, scale, mask leak\)"):
        verify(model, hidden, readers=readers)
