"""Diagnoses and runs for the report's tests."""

import math
import random

from levelhead.diagnosis import Diagnosis, Finding, Record
from levelhead.harness import compare as compare_module
from levelhead.harness import step_times
from levelhead.harness.config import CompareSettings
from levelhead.harness.tasks import resolve_task

HOSTILE = "</script><script>alert(1)//\"'&<!--"
"""A name that ends a script element, starts another, breaks out of attributes."""

METRICS = (
    *(f"entropy_nats_{s}" for s in ("mean", "q10", "q50", "q90")),
    *(f"p_max_{s}" for s in ("mean", "q50", "q90")),
    *(f"theta_{end}_{s}" for end in ("lower", "upper") for s in ("q10", "q50", "q90", "q99")),
    "score_max_max", "raw_score_max", "jacobian_kappa", "jacobian_bound", "jacobian_surrogate",
    *(f"{name}_{part}" for name in ("kappa", "stable_rank", "spectral_norm", "effective_rank")
      for part in ("q", "k", "v", "o", "qk", "vo")),
)  # fmt: skip
LAYER_METRICS = ("kappa_q_fused", "num_keys", "my_own_number")


def made_up_diagnosis(num_layers=3, num_heads=5, name="blocks.{}.attn", seed=0, **parts):
    """A diagnosis of numbers drawn at random, a NaN and an infinity among them.

    Args:
        num_layers: How many.
        num_heads: In each.
        name: Of a layer, with a place for its number.
        seed: Of the numbers.
        parts: Fields of ``Diagnosis`` to put in place of the made-up ones.
    """
    draw = random.Random(seed)
    records = [
        Record(name.format(layer), layer, head, metric, draw.lognormvariate(0, 1), f"how {metric}")
        for metric in METRICS
        for layer in range(num_layers)
        for head in range(num_heads)
    ]
    records += [
        Record(name.format(layer), layer, -1, metric, 7.0, f"how {metric}")
        for metric in LAYER_METRICS
        for layer in range(num_layers)
    ]
    bound = METRICS.index("jacobian_bound") * num_layers * num_heads
    for place, value in ((0, math.nan), (bound, math.inf)):
        records[place] = Record(**{**vars(records[place]), "value": value})
    finding = Finding(
        "saturated_softmax", "severe", name.format(1), 2, "entropy_nats_q50", 0.01, 0.1,
        "a paper", "the head looks at one key", "convert it", 3,
    )  # fmt: skip
    made = {
        "records": records,
        "findings": [finding],
        "verdict": "Unhealthy: saturated softmax",
        "meta": {"model": "toy", "num_tokens": 17, "not_measured": ["blocks.2: no batch"]},
        "curves": {"loss": [(step, 2.0 / (1 + step)) for step in range(50)]},
    }
    return Diagnosis(**{**made, **parts})


def real_run(folder, monkeypatch, steps=12, seeds=3):
    """Train a few tiny models side by side; returns the summary.

    Args:
        folder: Of the run.
        monkeypatch: pytest's.
        steps: Of each training.
        seeds: Paired ones.
    """
    monkeypatch.setattr(step_times, "TIMING_ROUNDS", 2)
    options = {"vit": {"embed_dim": 12, "num_heads": 2, "num_layers": 1}}
    task = resolve_task("digits", options, steps=steps)
    settings = CompareSettings(
        tasks=(task,), variants=("softmax", "quest", "gate"), inits=("default",), seeds=seeds
    )
    return compare_module.compare(settings, folder, workers=1)
