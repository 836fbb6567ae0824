"""``levelhead.Attention`` converted is ``levelhead.Attention`` built as the variant."""

import copy

import pytest
import torch

import levelhead as lh
from hosts import OWN
from levelhead.capture import capture
from levelhead.sites.host import installed_in
from levelhead.store_checksum import checksum
from matrix import VARIANTS, outputs, randomise, worst

HOST = OWN["levelhead"]


def built_as(variant, converted):
    """The model built with the variant, holding the values of a converted one."""
    model = HOST.build(variant=variant).double()
    state = converted.state_dict()
    names = {name: name.replace(".levelhead.", ".") for name in state}
    model.load_state_dict({names[name]: values for name, values in state.items()})
    return model.eval()


@pytest.mark.parametrize("variant", [v for v in VARIANTS if v != "softmax"])
def test_converted_is_built_as_the_variant(variant):
    model, batch = HOST.build().double(), HOST.batch().double()
    stock, before = outputs(model, batch), checksum(model.state_dict())
    lh.convert(model, variant, start="paper")
    randomise(model)
    twin = built_as(variant, model)
    assert worst(outputs(model, batch), outputs(twin, batch)) < 1e-12
    assert worst(outputs(model, batch), stock) > 1e-6
    call = {"is_causal": True, "need_weights": True}
    for mine, built in ((model[0], twin[0]),):
        for found, expected in zip(mine(batch, **call), built(batch, **call), strict=True):
            assert worst(found, expected) < 1e-12
    assert model[0].scale == twin[0].scale
    lh.restore(model)
    assert checksum(model.state_dict()) == before
    assert torch.equal(outputs(model, batch), stock)


def test_the_site_still_tells_the_hosts_own_scale_and_capture_sees_what_runs():
    model, batch = HOST.build(), HOST.batch()
    before = [site.scale for site in lh.find_attention(model)]
    lh.convert(model, "quest")
    assert [site.scale for site in lh.find_attention(model)] == before
    calls = []
    with torch.no_grad(), capture(model, calls.append):
        model(batch)
    assert [call.scale for call in calls] == [1.0, 1.0]
    torch.testing.assert_close(calls[0].key.norm(dim=-1), torch.ones(2, 1, 11))


def test_state_moves_once_per_step_and_copies_run():
    model, batch = HOST.build().train(), HOST.batch()
    lh.convert(model, "sigma_reparam + affine")
    randomise(model)
    twin = copy.deepcopy(model)
    assert torch.equal(twin(batch), model(batch))
    assert (installed_in(model[0]).inner.weights.num_steps == 2).all()  # a preserving start is one


def test_an_attention_built_as_a_variant_is_refused():
    model = HOST.build(variant="quest + gate")
    before = checksum(model.state_dict())
    with pytest.raises(ValueError, match=r"0: it was built as quest \+ gate; build it with varia"):
        lh.convert(model, "sink")
    assert checksum(model.state_dict()) == before
    assert all(installed_in(module) is None for module in model.modules())
