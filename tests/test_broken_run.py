"""A real training broken on purpose: the monitor names the layer before the loss is NaN."""

import importlib.util
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def benchmark():
    path = Path(__file__).parents[1] / "benchmarks" / "broken_run.py"
    spec = importlib.util.spec_from_file_location("broken_run", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_thirty_times_the_learning_rate_is_told_before_the_loss_is_nan(benchmark):
    run = benchmark.train(benchmark.FACTOR, num_steps=40)
    assert run.first_nonfinite is not None
    named = [alert for alert in run.alerts if alert.layer]
    assert named[0].step < run.first_nonfinite
    assert named[0].kind == "exploding_scores"
    assert named[0].layer == "blocks.0.attn"
    scores = run.seen[named[0].step]["attn/blocks.0.attn/max/score_max"]
    assert named[0].value == pytest.approx(scores)
    assert named[0].value > 100 > 10 * run.seen[0]["attn/blocks.0.attn/max/score_max"]


def test_the_healthy_twin_is_silent(benchmark):
    run = benchmark.train(1, num_steps=40)
    assert run.alerts == []
    assert run.first_nonfinite is None
    assert list(run.seen) == list(range(0, 40, benchmark.EVERY))
    assert run.losses[-1] < run.losses[0] - 1


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_other_starts_break_and_learn_the_same_way(benchmark, seed):
    broken = benchmark.train(benchmark.FACTOR, seed=seed)
    assert broken.first_nonfinite is not None
    assert min(a.step for a in broken.alerts if a.layer) < broken.first_nonfinite
    healthy = benchmark.train(1, seed=seed)
    assert healthy.alerts == []
    assert healthy.losses[-1] < 3
