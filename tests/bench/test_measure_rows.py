"""The rows that the sensitivity is timed on are what they are called."""

from levelhead.bench.measure_rows import sensitivity_rows


def test_rows_are_probabilities_of_the_kinds_they_name():
    for kind, rows in sensitivity_rows(40, 16, "cpu").items():
        assert (rows.sum(-1) - 1).abs().max() < 1e-6
        if "causal" in kind:
            assert ((rows > 0).sum(-1) <= rows.new_tensor([i % 16 + 1 for i in range(40)])).all()
    assert ((sensitivity_rows(3, 16, "cpu")["uniform, odd"] > 0).sum(-1) == 15).all()
