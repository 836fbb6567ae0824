"""Architecture by variant: all that must hold, or a refusal that says why."""

import pytest

import matrix


def assert_walked(architecture, variant):
    answer = matrix.walk(architecture, variant)
    word, reasons = matrix.cell(architecture, variant)
    assert (answer == "yes") == (word != "-")
    if answer != "yes":
        assert all(reason in answer for reason in reasons)


@pytest.mark.parametrize("variant", matrix.FAST)
@pytest.mark.parametrize("architecture", matrix.ARCHITECTURES)
def test_three_variants_everywhere(architecture, variant):
    assert_walked(architecture, variant)


@pytest.mark.slow
@pytest.mark.parametrize("variant", [v for v in matrix.VARIANTS if v not in matrix.FAST])
@pytest.mark.parametrize("architecture", matrix.ARCHITECTURES)
def test_every_variant_everywhere(architecture, variant):
    assert_walked(architecture, variant)


REFUSED = {
    ("nystromformer", "affine"), ("nystromformer", "sink"), ("nystromformer", "off_by_one"),
    ("nystromformer", "soft_cap(cap=2.0)"), ("gpt_oss", "sink"), ("gpt_oss", "off_by_one"),
    ("gpt_oss", "precondition"), ("gemma2", "soft_cap(cap=2.0)"), ("qwen3", "qknorm_ds"),
    ("gemma3", "qknorm_ds"), ("olmo2", "qknorm_ds"), ("qwen3_next", "qknorm_ds"),
    ("timm_vit_norms", "qknorm_ds"), ("qwen3_next", "gate"),
    ("qwen3_next", "gate(granularity='headwise')"),
    *(("swin_v2", v) for v in ("quest", "qnorm", "qknorm", "qknorm_hs", "qknorm_ds")),
}  # fmt: skip
"""Single terms, by hand, so that a refusal too many is seen."""


def test_what_is_refused_is_what_must_be():
    single = [v for v in matrix.VARIANTS if " + " not in v]
    found = {
        (architecture, variant)
        for architecture in matrix.ARCHITECTURES
        for variant in single
        if matrix.cell(architecture, variant)[0] == "-"
    }
    assert found == REFUSED


@pytest.mark.parametrize("path", matrix.WRITTEN, ids=lambda path: path.name)
def test_the_tables_are_those_of_the_matrix(path):
    assert path.read_text() == matrix.with_table(path), "run: python tests/matrix.py"


def test_a_stale_table_would_be_seen(tmp_path, monkeypatch):
    path = tmp_path / "README.md"
    path.write_text("<!-- table: python tests/matrix.py -->\nstale\n<!-- /table -->\n")
    monkeypatch.setitem(matrix.WRITTEN, path, lambda: "| fresh |")
    assert matrix.with_table(path) == path.read_text().replace("stale", "| fresh |")
