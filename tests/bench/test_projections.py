"""The projections' benchmark times each term beside plain projections that compute the same."""

import json

import pytest
import torch

from levelhead import Attention
from levelhead.bench import projections
from levelhead.variants import VARIANTS


@pytest.fixture(scope="module")
def record(tmp_path_factory):
    out = tmp_path_factory.mktemp("bench") / "projections.json"
    assert projections.main(["--tokens", "24", "--repeats", "2", "--out", str(out)]) == 0
    return json.loads(out.read_text())


def test_every_term_on_the_projections_is_measured(record):
    (times,) = record["times"]
    terms = {name for name, info in VARIANTS.items() if info.stage == "projections"}
    assert terms <= {name.split("(")[0] for name in times["over_plain"]}
    share = times["plain_over_sdpa"]["ratio"]
    for row in times["over_plain"].values():
        assert row["rounds"] == 2
        assert row["added_over_sdpa"] == pytest.approx((row["ratio"] - 1) * share)


def test_the_table_has_a_line_for_each(record):
    text = projections.table(record)
    for name in projections.projection_variants():
        assert f"  {name} " in text


@pytest.mark.parametrize("variant", ["softmax", *projections.projection_variants()])
def test_what_is_timed_is_a_training_step_of_the_three_projections(variant, monkeypatch):
    made = []

    class Kept(Attention):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            made.append(self)

    monkeypatch.setattr(projections, "Attention", Kept)
    projections.project_with(variant, torch.randn(2, 5, 24))()
    (attention,) = made
    for linear in (attention.q_proj, attention.k_proj, attention.v_proj):
        assert linear.weight.grad.abs().sum() > 0
    assert attention.training
