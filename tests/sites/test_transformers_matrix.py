"""Architecture by variant: all that must hold, or a refusal that says why."""

import pytest

import matrix


@pytest.mark.parametrize("variant", matrix.FAST)
@pytest.mark.parametrize("architecture", matrix.ARCHITECTURES)
def test_three_variants_everywhere(architecture, variant):
    answer = matrix.walk(architecture, variant)
    assert answer == "yes" or (architecture, variant) in REFUSED
    if answer != "yes":
        assert REFUSED[architecture, variant] in answer


REFUSED = {
    ("nystromformer", "affine + gate"): "affine with landmark attention",
    ("qwen3_next", "affine + gate"): "the host gates its output already",
}


@pytest.mark.slow
@pytest.mark.parametrize("variant", [v for v in matrix.VARIANTS if v not in matrix.FAST])
@pytest.mark.parametrize("architecture", matrix.ARCHITECTURES)
def test_every_variant_everywhere(architecture, variant):
    answer = matrix.walk(architecture, variant)
    host_terms = ("landmark attention", "learned sink", "norms of queries and keys", "soft cap",
                  "gate")  # fmt: skip
    assert answer == "yes" or any(f"with {term}:" in answer for term in host_terms)


def test_the_table_of_the_readme_is_written_by_the_matrix():
    table = matrix.support_table(("gpt2", "nystromformer"), ("quest", "sink"))
    assert table.splitlines()[:4] == [
        "|  | `quest` | `sink` |",
        "| --- | --- | --- |",
        "| gpt2 | yes | yes |",
        "| nystromformer | yes | - |",
    ]
    assert "landmark attention" in table
