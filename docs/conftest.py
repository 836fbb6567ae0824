"""The pages run as doctests; one that needs trained weights is skipped where they are missing."""

import pytest

from trained_models import INSTALL, missing

NEED_WEIGHTS = {"measures.md": tuple(INSTALL)}


def pytest_collection_modifyitems(items):
    for item in items:
        reasons = [missing(package) for package in NEED_WEIGHTS.get(item.path.name, ())]
        for reason in filter(None, reasons):
            item.add_marker(pytest.mark.skip(reason=reason))
