"""Install attention by the seam alone, below ``levelhead.convert``."""

import torch

from levelhead.sites.build import build_installed, derive
from levelhead.sites.combining import refusal
from levelhead.sites.find import find_attention
from levelhead.sites.host import host_of
from levelhead.steps import track_steps
from levelhead.variants import parse_variant


def install(model, variant):
    """Run every attention of a model as a variant; return its sites."""
    variant = parse_variant(variant)
    sites = find_attention(model)
    for site in sites:
        host = host_of(site)
        why = refusal(site, variant) or host.refuses(site, variant)
        if why is not None:
            raise ValueError(why)
        installed = build_installed(site, host, variant)
        derive(site, installed)
        host.install(site, installed)
    track_steps(model)
    return sites


def uninstall(sites):
    """Give every module its own attention back."""
    for site in sites:
        host_of(site).uninstall(site)


def randomise(model):
    """Random weights everywhere, so that zero-initialised parts of a model take part too."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.3, generator=generator)
    return model


def gradients(model, output, inputs):
    """Return gradients of a random functional of the output, by name."""
    direction = torch.randn(output.shape, generator=torch.Generator().manual_seed(5))
    named = dict(model.named_parameters()) | {"input": inputs}
    named = {name: tensor for name, tensor in named.items() if tensor.requires_grad}
    total = (output * direction.to(output.dtype)).sum()
    found = torch.autograd.grad(total, list(named.values()), allow_unused=True)
    return dict(zip(named, found, strict=True))


def assert_same_gradients(stock, converted, atol):
    """Assert that all stock gradients are there and equal."""
    for name, expected in stock.items():
        found = converted[name]
        assert (found is None) == (expected is None), name
        if expected is not None:
            scale = max(expected.abs().max().item(), 1.0)
            torch.testing.assert_close(found, expected, rtol=0, atol=atol * scale, msg=name)
