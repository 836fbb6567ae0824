"""The induction score finds what continues a repetition, and nothing else."""

import pytest
import torch

from levelhead.measure.induction import induction_weights
from levelhead.measure.streaming import AttentionScores

BATCH, HEADS, LENGTH, WIDTH = 2, 3, 11, 5


def repeated(length=LENGTH, batch=BATCH):
    generator = torch.Generator().manual_seed(0)
    words = torch.stack([torch.randperm(97, generator=generator)[:length] for _ in range(batch)])
    return torch.cat([words, words], 1)


def random_scores(num, sink_score=None, is_causal=True):
    generator = torch.Generator().manual_seed(1)
    query, key = (
        torch.randn(BATCH, HEADS, num, WIDTH, generator=generator, dtype=torch.float64)
        for _ in range(2)
    )
    return AttentionScores(query, key, 0.4, is_causal=is_causal, sink_score=sink_score)


def by_hand(scores, ids):
    """Loops over the dense weights."""
    rows = 0.4 * scores.query @ scores.key.mT
    num = ids.shape[1]
    rows = rows.masked_fill(torch.ones(num, num).triu(1).bool(), -torch.inf)
    if scores.sink_score is not None:
        sink = scores.sink_score.view(1, -1, 1, 1).expand(*rows.shape[:3], 1)
        rows = torch.cat([rows, sink], -1)
    weights = rows.softmax(-1)
    found = torch.full(rows.shape[:3], torch.nan, dtype=torch.float64)
    for sample, row in enumerate(ids.tolist()):
        for t, token in enumerate(row):
            earlier = [s for s in range(t) if row[s] == token]
            if earlier and earlier[-1] + 1 < t:
                found[sample, :, t] = weights[sample, :, t, earlier[-1] + 1]
    return found


@pytest.mark.parametrize("has_sink", [False, True])
@pytest.mark.parametrize("few", [False, True])
def test_it_is_the_weight_on_what_followed(has_sink, few):
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(0, 3 if few else 40, (BATCH, 23), generator=generator)
    sink = torch.tensor([0.3, -1.0, 2.0], dtype=torch.float64) if has_sink else None
    scores = random_scores(23, sink)
    found, query_idx = induction_weights(scores, ids, num_queries=None)
    expected = by_hand(scores, ids)
    assert query_idx.tolist() == list(range(23))
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=0, equal_nan=True)
    assert not found.isnan().all()


def test_a_head_that_copies_has_one_and_a_head_that_stays_has_none():
    ids = repeated()
    where = torch.arange(2 * LENGTH)
    follows = torch.where(where >= LENGTH, where - LENGTH + 1, where)
    keys = torch.eye(2 * LENGTH).expand(BATCH, 2, -1, -1)
    queries = torch.stack([keys[0, 0, follows], keys[0, 0, where]]).expand(BATCH, -1, -1, -1)
    scores = AttentionScores(queries.contiguous(), keys, 50.0, is_causal=True)
    found, _ = induction_weights(scores, ids, num_queries=None)
    assert found[:, :, :LENGTH].isnan().all()
    assert torch.allclose(found[:, 0, LENGTH:], torch.ones(1))
    assert torch.allclose(found[:, 1, LENGTH:], torch.zeros(1), atol=1e-6)


def test_padding_masked_documents_and_samples_of_queries_are_left_out():
    ids = repeated()
    num = 2 * LENGTH
    real = torch.ones(BATCH, num, dtype=torch.bool)
    real[1, :] = False
    found, query_idx = induction_weights(random_scores(num), ids, num_queries=7, real_queries=real)
    assert found.shape == (BATCH, HEADS, 7)
    assert len(query_idx) == 7
    assert found[1].isnan().all()
    assert not found[0, :, query_idx >= LENGTH].isnan().any()
    document = torch.arange(num) >= LENGTH
    scores = random_scores(num)
    apart = AttentionScores(
        scores.query, scores.key, 0.4, attn_mask=document[:, None] == document, is_causal=True
    )
    found, _ = induction_weights(apart, ids, num_queries=None)
    # what followed the last word of the first copy is the start of the second: the same document
    assert found[..., :-1].isnan().all()


def test_ids_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="token_ids must hold a number a query and key"):
        induction_weights(random_scores(7), repeated())
    with pytest.raises(ValueError, match="num_queries must be at least 1"):
        induction_weights(random_scores(2 * LENGTH), repeated(), num_queries=0)
