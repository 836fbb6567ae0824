"""Initialisers on tensors, in place."""

from levelhead.init.conditioned import conditioned_
from levelhead.init.mimetic import mimetic_
from levelhead.init.orthogonal import orthogonal_, xavier_
from levelhead.init.weight_selection import select_weight, select_weights

__all__ = [
    "conditioned_",
    "mimetic_",
    "orthogonal_",
    "select_weight",
    "select_weights",
    "xavier_",
]
