"""Spectra of projections and products against numpy on the matrices themselves."""

import numpy as np
import pytest
import torch

from levelhead.linalg import Status
from levelhead.measure.spectra import attention_spectra, matrix_spectra


def weights(embed_dim=13, num_heads=4, num_kv_heads=2, head_dim=3, dtype=torch.float64):
    sizes = (num_heads, num_kv_heads, num_kv_heads)
    q, k, v = (torch.randn(embed_dim, count * head_dim, dtype=dtype) for count in sizes)
    return q, k, v, torch.randn(num_heads * head_dim, embed_dim, dtype=dtype)


def columns(weight, head, head_dim=3):
    return weight[:, head * head_dim : (head + 1) * head_dim].numpy()


def check(spectra, head, matrix, rank):
    values = np.linalg.svd(matrix, compute_uv=False)[:rank]
    shares = values / values.sum()
    assert float(spectra.kappa[head]) == pytest.approx(values[0] / values[-1])
    assert float(spectra.spectral_norm[head]) == pytest.approx(values[0])
    assert float(spectra.stable_rank[head]) == pytest.approx((values**2).sum() / values[0] ** 2)
    entropy = -(shares * np.log(shares)).sum()
    assert float(spectra.effective_rank[head]) == pytest.approx(np.exp(entropy))
    assert int(spectra.rank[head]) == rank


def cosine_with_identity(matrix):
    size = min(matrix.shape)
    return np.trace(matrix) / np.linalg.norm(matrix) / size**0.5


def test_heads_products_and_fused_matrices_under_grouped_queries():
    q, k, v, o = weights()
    found = attention_spectra(q, k, v, o, num_heads=4, num_kv_heads=2)
    for head in range(4):
        query, output = columns(q, head), o[3 * head : 3 * head + 3].numpy()
        key, value = columns(k, head // 2), columns(v, head // 2)
        check(found.q, head, query, 3)
        check(found.o, head, output, 3)
        check(found.qk, head, query @ key.T, 3)
        check(found.vo, head, value @ output, 3)
        assert float(found.qk.alignment[head]) == pytest.approx(
            cosine_with_identity(query @ key.T)
        )
        assert float(found.vo.alignment[head]) == pytest.approx(
            cosine_with_identity(value @ output)
        )
    for head in range(2):
        check(found.k, head, columns(k, head), 3)
        check(found.v, head, columns(v, head), 3)
    fused_value = np.concatenate([columns(v, head // 2) for head in range(4)], axis=1)
    product = fused_value @ o.numpy()
    assert float(found.fused.vo.alignment) == pytest.approx(cosine_with_identity(product))
    assert float(found.fused.vo.spectral_norm) == pytest.approx(np.linalg.norm(product, 2))
    assert float(found.fused.q.kappa) == pytest.approx(np.linalg.cond(q.numpy()))


def test_mimetic_signs_show_in_the_alignment():
    identity = torch.eye(13)
    found = attention_spectra(identity, identity, identity, -identity, num_heads=1)
    assert float(found.qk.alignment) == pytest.approx(1)
    assert float(found.vo.alignment) == pytest.approx(-1)


def test_cross_attention_products_of_two_widths():
    q, _, _, o = weights(num_kv_heads=4)
    _, k, v, _ = weights(embed_dim=7, num_kv_heads=4)
    found = attention_spectra(q, k, v, o, num_heads=4)
    product = columns(q, 1) @ columns(k, 1).T
    check(found.qk, 1, product, 3)
    assert float(found.qk.alignment[1]) == pytest.approx(cosine_with_identity(product))


def test_ranks_of_known_matrices():
    stack = torch.stack([torch.eye(5), torch.ones(5, 5), torch.zeros(5, 5)])
    found = matrix_spectra(stack)
    assert found.stable_rank.tolist() == pytest.approx([5, 1, 0])
    assert found.effective_rank.tolist() == pytest.approx([5, 1, 0])
    assert found.rank.tolist() == [5, 1, 0]
    assert found.kappa.tolist() == pytest.approx([1, torch.inf, torch.inf])
    assert found.kappa_nonzero.tolist() == pytest.approx([1, 1, torch.inf])


def test_case_a21_a_bad_head_costs_its_neighbours_nothing():
    q, k, v, o = weights(dtype=torch.float32)
    alone = attention_spectra(q, k, v, o, num_heads=4, num_kv_heads=2)
    q[1, 4] = torch.nan
    k[:, 3:6] = 0
    found = attention_spectra(q, k, v, o, num_heads=4, num_kv_heads=2)
    status = [Status(int(s)).word for s in found.qk.status]
    assert status == ["ok", "non-finite", "rank-deficient", "rank-deficient"]
    assert found.qk.kappa[0] == alone.qk.kappa[0]
    assert found.qk.kappa[1].isnan()
    assert found.qk.alignment[1].isnan()
    assert found.qk.kappa[2:].isinf().all()
    assert found.qk.alignment[2:].tolist() == [0, 0]
    assert torch.equal(found.vo.kappa, alone.vo.kappa)
    assert Status(int(found.fused.q.status)).word == "non-finite"


def test_without_an_output_projection():
    q, k, v, _ = weights()
    found = attention_spectra(q, k, v, num_heads=4, num_kv_heads=2)
    assert found.o is found.vo is found.fused.o is found.fused.vo is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_heads": 5}, "the number of heads must divide the columns, got q_weight"),
        ({"num_kv_heads": 3}, "num_kv_heads must divide num_heads, got num_kv_heads=3"),
        ({"num_kv_heads": 4}, "the number of heads must divide the columns"),
        ({"num_heads": 2, "num_kv_heads": 2}, "weights must fit together, got q_weight"),
    ],
)
def test_weights_that_do_not_fit_are_refused(change, message):
    options = {"num_heads": 4, "num_kv_heads": 2} | change
    if "num_heads" in change and "num_kv_heads" not in change:
        options["num_kv_heads"] = change["num_heads"]
    with pytest.raises(ValueError, match=message):
        attention_spectra(*weights(), **options)
