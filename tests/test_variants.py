"""The table, the string form and its refusals."""

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import levelhead as lh
from cases import OPTIONS, all_terms, full_house, legal_pairs, refused_pairs, written
from levelhead.terms import Term, parse_terms
from levelhead.variants import SLOTS, VARIANTS, Variant

EVERY = [*all_terms(), *OPTIONS, *legal_pairs(), full_house()]


@pytest.mark.parametrize("text", EVERY)
def test_string_form_round_trips_in_any_order(text):
    variant = lh.parse_variant(text)
    assert lh.parse_variant(str(variant)) == variant
    backwards = " + ".join(map(str, reversed(parse_terms(text))))
    assert lh.parse_variant(backwards) == variant
    assert lh.parse_variant(variant) is variant


NAMES = st.from_regex(r"[a-z][a-z_0-9]{0,8}", fullmatch=True).filter(str.isidentifier)
VALUES = st.one_of(
    st.booleans(), st.none(), st.integers(), st.text(max_size=8),
    st.floats(allow_nan=False, allow_infinity=False),
)  # fmt: skip


@given(st.dictionaries(NAMES, st.dictionaries(NAMES, VALUES, max_size=3), min_size=1, max_size=4))
def test_any_terms_round_trip(options):
    import keyword

    words = [*options, *(key for inner in options.values() for key in inner)]
    if any(keyword.iskeyword(word) for word in words):
        return
    terms = tuple(Term(name, inner) for name, inner in options.items())
    assert parse_terms(" + ".join(map(str, terms))) == terms


@given(st.text(max_size=40))
def test_any_text_is_read_or_refused_with_a_value_error(text):
    try:
        terms = parse_terms(text)
    except ValueError:
        return
    assert parse_terms(" + ".join(map(str, terms))) == terms


@pytest.mark.parametrize(
    "text",
    [
        "",
        "quest +",
        "quest(1)",
        "quest - gate",
        "sink(start=x)",
        "sink(**{})",
        "sink(start=f())",
        3,
    ],
)
def test_malformed_text_says_how_a_variant_is_written(text):
    with pytest.raises(
        ValueError, match=r"is written as name, or name\(key=value, \.\.\.\), joined by \+"
    ):
        lh.parse_variant(text)


def test_nothing_in_a_string_is_run():
    with pytest.raises(ValueError, match="is written as"):
        lh.parse_variant("gate(bias=__import__('os').system('true'))")


def test_unknown_term_lists_the_known_ones():
    known = ", ".join(VARIANTS)
    with pytest.raises(ValueError, match=f"unknown variant term 'quset'; known: {known}"):
        lh.parse_variant("quset + gate")


def test_unknown_and_missing_and_wrong_options_say_what_is_valid():
    with pytest.raises(
        ValueError, match="gate takes other options, got size=3; valid: granularity, bias"
    ):
        lh.parse_variant("gate(size=3)")
    with pytest.raises(ValueError, match="quest takes other options, got x=3; valid: eps"):
        lh.parse_variant("quest(x=3)")
    with pytest.raises(
        ValueError, match=r"soft_cap needs cap, got soft_cap; valid: soft_cap\(cap=\.\.\.\)"
    ):
        lh.parse_variant("soft_cap")
    with pytest.raises(
        ValueError, match="soft_cap needs cap of another type, got cap='x'; valid: float"
    ):
        lh.parse_variant("soft_cap(cap='x')")
    with pytest.raises(
        ValueError, match="affine needs warm_start of another type, got warm_start=1"
    ):
        lh.parse_variant("affine(warm_start=1)")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("gate(granularity='x')", "unknown gate granularity 'x'; known: elementwise, headwise"),
        ("affine(phi='x')", "unknown affine phi 'x'; known: linear_clipping, sigmoid"),
        ("affine(count='x')", "unknown affine count 'x'; known: visible, keys"),
        ("affine(moving_average='x')", "unknown affine moving_average 'x'; known: per_head, per_layer"),
        ("affine(rho=1.0)", r"rho must be in \[0, 1\), got rho=1.0"),
        ("soft_cap(cap=-1)", "cap must be positive, got cap=-1"),
        ("quest(eps=0)", "eps must be positive, got eps=0"),
        ("precondition(eps=-1.0)", "eps must be positive, got eps=-1.0"),
        ("spectral(form='x')", "unknown spectral form 'x'; known: identity, svd"),
        ("spectral(layout='x')", "unknown spectral layout 'x'; known: fused, per_head"),
        ("spectral(form='svd', strength=1)", "the svd form of spectral takes its strength from the weight"),
    ],
)  # fmt: skip
def test_options_out_of_range_are_refused(text, words):
    with pytest.raises(ValueError, match=words):
        lh.Attention(12, 3, variant=text)


@pytest.mark.parametrize("pair", refused_pairs())
def test_refused_pairs_name_both_and_the_reason(pair):
    first, second = pair
    with pytest.raises(ValueError, match=first) as caught:
        lh.parse_variant(f"{written(first)} + {written(second)}")
    assert second in str(caught.value)
    assert "stage" in str(caught.value) or "cancels any positive factor" in str(caught.value)


def test_one_term_twice_is_refused():
    with pytest.raises(ValueError, match="each term may stand once, got quest twice"):
        lh.parse_variant("quest + quest")


def test_cancelled_sink_is_really_without_gradient():
    """The reason of the refusal, checked on the numbers."""
    from levelhead.stages.outputs import equilibrate_rows
    from levelhead.stages.softmax import sink_attention

    query, key, value = (torch.randn(1, 2, 5, 3, dtype=torch.float64) for _ in range(3))
    sink = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    output = equilibrate_rows(sink_attention(query, key, value, sink, None, True, 0.5))
    output.square().mul(torch.rand_like(output)).sum().backward()
    assert sink.grad.abs().max() < 1e-14


def test_softmax_is_the_empty_variant():
    assert lh.parse_variant("softmax") == Variant()
    assert str(lh.parse_variant("quest + softmax")) == "quest"
    assert str(Variant()) == "softmax"


def test_the_table_is_complete_and_plain_data():
    expected = (
        "softmax off_by_one sink quest qnorm qknorm qknorm_hs qknorm_ds soft_cap affine gate "
        "precondition spectral sigma_reparam"
    )
    assert {info.name for info in lh.variants()} == set(expected.split())
    for info in lh.variants():
        row = json.loads(json.dumps(info.as_dict()))
        for column in (
            "name",
            "stage",
            "equation",
            "source",
            "parameters",
            "neutral",
            "when",
            "fused",
        ):
            assert row[column], (info.name, column)
        assert info.slot in SLOTS


SIZES = {"E": 30, "H": 6, "D": 5}


@pytest.mark.parametrize("name", VARIANTS)
def test_the_parameters_a_row_promises_are_those_that_are_added(name):
    added = sum(p.numel() for p in lh.Attention(30, 6, variant=written(name)).parameters())
    added -= sum(p.numel() for p in lh.Attention(30, 6).parameters())
    promised = VARIANTS[name].parameters.split(" elementwise")[0]
    product = 1
    for factor in promised.split():
        product *= SIZES.get(factor) or int(factor)
    assert added == product


def test_affine_and_gate_add_what_the_paper_reports():
    """Millions of parameters of Bae et al. table 1 and 2: architecture sizes times E x H, E x H D."""
    reported = {
        (1024, 16, 64, 24): (0.4, None),
        (2048, 32, 64, 16): (1.0, 67.1),
        (3072, 24, 128, 28): (2.1, 264.2),
    }
    for (embed_dim, num_heads, head_dim, num_layers), (affine, gate) in reported.items():
        with torch.device("meta"):
            options = {"head_dim": head_dim}
            plain, with_affine, with_gate = (
                sum(
                    p.numel()
                    for p in lh.Attention(embed_dim, num_heads, variant=v, **options).parameters()
                )
                for v in ("softmax", "affine", "gate")
            )
        millions = num_layers * (with_affine - plain) / 1e6
        assert round(millions, 1) == affine or abs(millions - affine) < 0.06
        if gate is not None:
            assert abs(num_layers * (with_gate - plain) / 1e6 - gate) < 0.1
