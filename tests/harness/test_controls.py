"""What tells conditioning from scale is added when asked for, and pointed out when not."""

import pytest

from levelhead.harness.config import Cell
from levelhead.harness.controls import control_sentences, with_controls
from levelhead.harness.tasks import make_task, resolve_task
from levelhead.harness.train import start_model


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (("spectral",), ("spectral", "spectral(strength=0)", "spectral(strength=1)")),
        (
            ("spectral(strength=1)", "spectral"),
            ("spectral(strength=1)", "spectral(strength=0)", "spectral"),
        ),
        (
            ("quest + spectral(strength=0)",),
            ("spectral(strength=0) + quest", "spectral(strength=1) + quest", "spectral + quest"),
        ),
        (("spectral(form='svd')", "gate"), ("spectral(form='svd')", "gate")),
    ],
)
def test_spectral_is_run_over_its_strength(given, expected):
    assert with_controls(given, ("default",)) == (expected, ("default",))


def test_conditioned_gets_its_scale_matched_control():
    _, inits = with_controls(("quest",), ("default", "conditioned", "mimetic"))
    assert inits == ("default", "conditioned", "conditioned(gain='match')", "mimetic")
    assert with_controls((), inits)[1] == inits  # nothing twice
    _, options = with_controls((), ("conditioned(value='per_head')",))
    assert options[1] == "conditioned(gain='match', value='per_head')"


def test_every_control_is_a_name_that_a_model_takes():
    task = make_task(resolve_task("digits", {"vit": {"embed_dim": 12, "num_heads": 2}}))
    variants, inits = with_controls(("spectral + quest",), ("conditioned",))
    for variant in variants:
        for init in inits:
            start_model(task, Cell(task="digits", variant=variant, init=init, seed=0))


def rows(variants=("softmax",), inits=("default",)):
    return [{"variant": variant, "init": init} for init in inits for variant in variants]


def test_a_missing_control_is_pointed_out_with_the_option_that_adds_it():
    (sentence,) = control_sentences(rows(inits=("default", "conditioned")))
    assert "--controls adds conditioned(gain='match')" in sentence
    (sentence,) = control_sentences(rows(("softmax", "spectral", "spectral(strength=1)")))
    assert sentence.endswith("strengths are missing: --controls adds spectral(strength=0).")


def test_a_control_that_is_there_is_named_and_nothing_is_asked_for():
    variants, inits = with_controls(("softmax", "spectral"), ("default", "conditioned"))
    conditioned, spectral = control_sentences(rows(variants, inits))
    assert "what conditioning does is what its control shows as well" in conditioned
    assert "read its rows over the strength" in spectral
    assert "--controls" not in conditioned + spectral
    assert control_sentences(rows(("softmax", "quest"), ("default", "mimetic"))) == []
