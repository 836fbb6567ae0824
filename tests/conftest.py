"""Shared by all tests: a fixed seed, and the shape checker where it is asked for."""

import gc
import socket

import pytest
import torch


def pytest_addoption(parser):
    parser.addoption(
        "--check-shapes",
        action="store_true",
        help="check every annotated shape while the tests run (not with compile tests)",
    )


def pytest_configure(config):
    if config.getoption("--check-shapes"):
        from jaxtyping import install_import_hook

        config.stash[_HOOK] = install_import_hook(
            ["levelhead.stages", "levelhead.parts", "levelhead.attention", "levelhead.rows"],
            "beartype.beartype",
        )


def pytest_collection_modifyitems(config, items):
    if config.getoption("--check-shapes"):
        skip = pytest.mark.skip(reason="torch.compile fails inside the shape checker")
        for item in items:
            if item.get_closest_marker("compile"):
                item.add_marker(skip)


def pytest_collection_finish(session):
    """Spare the garbage collector the libraries, which stay: it would walk through them often."""
    gc.collect()
    gc.freeze()


_HOOK = pytest.StashKey()


@pytest.fixture(autouse=True)
def _fixed_seed():
    torch.manual_seed(0)


@pytest.fixture
def free_port():
    """A port on this machine that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
