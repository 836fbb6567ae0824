"""The certificate accepts the true ends of the spectrum and refuses any that fall short."""

import pytest
from heads import random_head

from levelhead.measure.certificate import ends_are_certified
from levelhead.measure.gram import weight_gram
from levelhead.measure.head import attention_head
from levelhead.measure.jacobian import jacobian_condition
from levelhead.measure.linearise import linearise


@pytest.mark.parametrize(
    ("low", "high", "accepted"),
    [(1.0, 1.0, True), (1.001, 1.0, False), (1.0, 0.999, False), (0.9, 1.1, True)],
)
def test_only_true_ends_are_certified(low, high, accepted):
    arguments = random_head()
    exact = jacobian_condition(*arguments, scale=0.1, method="autograd")
    linear = linearise(attention_head(*arguments, scale=0.1))
    ends = (low * exact.sigma_min, high * exact.sigma_max)
    assert ends_are_certified(lambda: weight_gram(linear), *ends, 1e-6) == accepted
