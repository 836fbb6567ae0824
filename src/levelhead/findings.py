"""The one table of thresholds: what counts as unhealthy, where that comes from, what to try."""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from levelhead.diagnosis import WHOLE_LAYER, Finding, Record, Severity

LAYERS = dict[str, dict[str, dict[int, float]]]
"""Layer, metric, head to number."""

FEW_KEYS = 16
"""Shorter rows are uniform at 1 / keys, which looks like a sink."""
LIVE_THETA, DEAD_THETA = 0.5, 0.1
"""Of the sensitivity that a row can have: the largest weight is 0.854 and 0.974 there."""
FROZEN_P_MAX = (1 + (1 - LIVE_THETA) ** 0.5) / 2  # theta = 4 p (1 - p)


@dataclass(frozen=True)
class Rule:
    """When to speak.

    Attributes:
        kind: Name of the finding.
        severity: Of the finding.
        metric: The number that is looked at.
        threshold: What it is compared with.
        per: "head": each head by itself; "median": the median over a layer's heads, so that most
            of them must be ill; "layer": the layer's own number.
        is_low: Whether numbers below the threshold are unhealthy, not those above.
        source: Where the threshold comes from.
        meaning: What it means.
        advice: What to try.
        applies: Of the layer's numbers: whether the rule can be asked at all.
        cause: Of the layer's numbers: a probable cause to add to the meaning.
    """

    kind: str
    severity: Severity
    metric: str
    threshold: float
    per: str
    source: str
    meaning: str
    advice: str
    is_low: bool = False
    applies: Callable[[dict[str, dict[int, float]]], bool] = lambda layer: True
    cause: Callable[[dict[str, dict[int, float]]], str] = lambda layer: ""


def _has_enough_keys(layer: dict[str, dict[int, float]]) -> bool:
    return layer.get("num_keys", {}).get(WHOLE_LAYER, 0) >= FEW_KEYS


def _is_frozen(layer: dict[str, dict[int, float]]) -> bool:
    """Whether most rows rest on one key: a long row may rightly choose a few of many.

    That lowers entropy over ln(keys) as well. Asked of the largest weight, which a monitor
    measures too; where it is unknown, nothing is said.
    """
    largest = layer.get("p_max_mean", {})
    return bool(largest) and _healthier_middle(largest, is_low=False) >= FROZEN_P_MAX


def _scale_cause(layer: dict[str, dict[int, float]]) -> str:
    """Name the scale where it is at least twice what the paper's 1/sqrt(D) would be."""
    scale = layer.get("scale", {}).get(WHOLE_LAYER, math.nan)
    usual = layer.get("usual_scale", {}).get(WHOLE_LAYER, math.nan)
    if not scale >= 2 * usual:
        return ""
    return f"; probable cause: the scale is {scale:.4g}, where 1/sqrt(head_dim) is {usual:.4g}"


HALF_MAX = 65504.0  # torch.finfo(torch.float16).max
HALF_EPS = 2.0**-10  # torch.finfo(torch.float16).eps

_THETA = (
    "theta of a row, at most 1, bounded from above (measures.md); the number is this library's: "
    "no layer of four healthy trained models is below 0.7"
)
_LOWER_SCALE = (
    "restore scale = 1/sqrt(head_dim); or bound the scores: levelhead.convert(model, 'qknorm') or "
    "'quest', 'soft_cap(cap=30)'; or a smaller learning rate"
)
_BOUND_SCORES = (
    "normalise queries and keys (levelhead.convert(model, 'qknorm') or 'quest'), lower the "
    "learning rate, or decay W_Q and W_K more"
)

RULES: tuple[Rule, ...] = (
    Rule(
        "nonfinite_weights", "severe", "nonfinite_weights", 1, "layer",
        "IEEE 754: one NaN spreads to every output",
        "projection weights hold NaN or infinity",
        "go back to the last checkpoint whose weights are finite",
    ),
    Rule(
        "nonfinite_scores", "severe", "nonfinite_qkv", 1, "head",
        "IEEE 754: one NaN spreads to every later layer",
        "query, key or value of the head holds NaN or infinity",
        "look at the first layer named here: its input or weights broke first",
    ),
    Rule(
        "nonfinite_scores", "severe", "nonfinite_rows", 1, "layer",
        "IEEE 754: a softmax over NaN or +inf is NaN",
        "attention scores are NaN or +inf",
        "look at the first layer named here: its input or weights broke first",
    ),
    Rule(
        "overflow", "severe", "overflow_frac", 1.0, "head",
        "largest finite number of the dtype the scores are computed in (torch.finfo)",
        "logit overflow: |query . key| before the scale is beyond what its dtype can hold",
        "bfloat16 in place of float16, or scale the query before the product; " + _BOUND_SCORES,
    ),
    Rule(
        "overflow", "warning", "raw_score_max", HALF_MAX, "head",
        "largest finite number of float16 (torch.finfo)",
        "logit overflow in float16: |query . key| before the scale is beyond 65504",
        "do not train or serve this model in float16; " + _BOUND_SCORES,
    ),
    Rule(
        "exploding_scores", "severe", "score_max_max", 1e4, "head",
        "Wortsman et al. 2023 (arXiv 2309.14322): attention logits of this size go with "
        "divergence",
        "scores grow without bound; training is close to diverging",
        _BOUND_SCORES,
    ),
    Rule(
        "exploding_scores", "warning", "score_max_max", 100.0, "head",
        "tau of QK-clip (Kimi K2, arXiv 2507.20534)",
        "the largest score is one that QK-clip would clip",
        _BOUND_SCORES,
    ),
    Rule(
        "saturated_softmax", "severe", "theta_upper_q50", DEAD_THETA, "median",
        _THETA,
        "saturated: in most heads half of the rows pass less than a tenth of the gradient that a "
        "row can pass",
        _LOWER_SCALE, is_low=True, cause=_scale_cause,
    ),
    Rule(
        "saturated_softmax", "warning", "theta_upper_q50", LIVE_THETA, "median",
        _THETA + ", the collapsed scores of a public report have 0.11",
        "saturated: in most heads half of the rows pass less than half of the gradient that a row "
        "can pass",
        _LOWER_SCALE, is_low=True, cause=_scale_cause,
    ),
    Rule(
        "entropy_collapse", "warning", "normalized_entropy_mean", 0.1, "median",
        "phenomenon: Zhai et al. 2023 (arXiv 2303.06296); the number is this library's: the "
        "collapsed scores of a public report have 0.06, their healthy twins 0.9. Asked only where "
        "the mean largest weight of most heads is 0.854 or more (theta <= 0.5)",
        "entropy collapse: the rows of most heads hold less than a tenth of the entropy that "
        "their keys allow",
        "levelhead.convert(model, 'sigma_reparam') or 'qknorm'; warm up longer",
        is_low=True, applies=_is_frozen,
    ),
    Rule(
        "sink", "note", "sink_mass_mean", 0.3, "head",
        "Gu et al. 2024 (arXiv 2410.10781): a head whose mean weight on the first token exceeds "
        "0.3",
        "attention sink: weight goes to the first token (or the learned sink) for want of a key",
        "harmless by itself; for quantisation or long streams: levelhead.convert(model, 'sink'), "
        "'off_by_one' or 'gate'",
        applies=_has_enough_keys,
    ),
    Rule(
        "induction_head", "note", "induction_mean", 0.25, "head",
        "prefix matching: Olsson et al. 2022 (arXiv 2209.11895); the number is this library's: "
        "the two induction heads of a trained decoder have 0.6 and 0.3, all others less than 0.1",
        "induction head: it attends to what followed this token the last time, and so continues "
        "what was repeated",
        "nothing: it is what in-context repetition rests on; keep it when pruning",
    ),
    Rule(
        "dead_head", "warning", "output_share", 0.01, "head",
        "this library: 1 % of the layer's mean is beyond what the other heads round away in "
        "bfloat16 (eps = 0.8 %)",
        "dead head: it adds next to nothing to the output on this batch",
        "prune it, or look for a cause: a gate that closed, a decay that shrank W_V or W_O",
        is_low=True,
    ),
    *(
        Rule(
            f"ill_conditioned_{part}", "warning", f"kappa_{part}", 1 / HALF_EPS, "head",
            "kappa = 1 / eps of float16: in half precision no digit of the weakest direction "
            "survives (Higham 2002, section 7.1)",
            f"ill-conditioned: {words} of the head hardly uses its weakest direction",
            "levelhead.initialize_(model, 'conditioned') before training, or "
            "levelhead.convert(model, 'spectral(strength=1)')",
        )
        for part, words in (("q", "W_Q"), ("k", "W_K"), ("v", "W_V"), ("o", "W_O"))
    ),
    Rule(
        "contracting_post_ln", "warning", "post_ln_contraction_depth", 1e-3, "layer",
        "product over depth of ||gamma|| / sigma, a bound on the norms' Jacobians: below 1 at "
        "every layer the product shrinks geometrically (sufficient condition); gradients of "
        "post-LN: Xiong et al. 2020 (arXiv 2002.04745). 1e-3 is the eps of float16",
        "contracting post-LN: the norms between input and output damp the residual stream by this "
        "factor, and with it the gradient of early layers",
        "pre-LN, a longer warm-up, or residual scaling (DeepNorm)",
        is_low=True,
    ),
    Rule(
        "outlier_channels", "warning", "systematic_outliers", 1, "layer",
        "Dettmers et al. 2022 (arXiv 2208.07339), section 3.2: 6.0 or more in 6 % of the tokens "
        "and in 25 % of the layers",
        "outlier channels: quantising these activations to int8 by tensor loses the others",
        "mixed decomposition (LLM.int8) or smoothing; to train without: levelhead.convert(model, "
        "'gate') or 'off_by_one'",
    ),
)  # fmt: skip
"""Rules, the more severe of one kind first: only the first that fires for a head is told."""

SEVERITIES: tuple[Severity, ...] = ("severe", "warning", "note")


def judge(records: Iterable[Record]) -> list[Finding]:
    """Compare numbers with the table.

    Args:
        records: Of all layers.

    Returns:
        One finding for each layer and kind, its worst head named; the most severe first, then in
        the order of the layers.
    """
    layers: LAYERS = {}
    for record in records:
        metrics = layers.setdefault(record.layer, {})
        metrics.setdefault(record.metric, {})[record.head] = record.value
    found = [finding for layer in layers.items() for finding in _judge_layer(*layer)]
    return sorted(found, key=lambda finding: SEVERITIES.index(finding.severity))


def _judge_layer(name: str, layer: dict[str, dict[int, float]]) -> Iterator[Finding]:
    told: dict[str, set[int]] = {}
    for rule in RULES:
        if rule.metric not in layer or not rule.applies(layer):
            continue
        values = _values(rule, layer[rule.metric])
        seen = told.setdefault(rule.kind, set())
        if rule.per == "layer" and seen:
            continue
        ill = {head: v for head, v in values.items() if _is_ill(rule, v) and head not in seen}
        if ill:
            seen.update(ill)
            worst = (min if rule.is_low else max)(ill, key=lambda head: ill[head])
            yield Finding(
                rule.kind, rule.severity, name, worst, rule.metric, ill[worst], rule.threshold,
                rule.source, rule.meaning + rule.cause(layer), rule.advice, len(ill),
            )  # fmt: skip


def _values(rule: Rule, by_head: dict[int, float]) -> dict[int, float]:
    if rule.per == "layer":
        return {WHOLE_LAYER: by_head[WHOLE_LAYER]} if WHOLE_LAYER in by_head else {}
    heads = {head: value for head, value in by_head.items() if head != WHOLE_LAYER}
    if rule.per == "head":
        return heads
    return {WHOLE_LAYER: _healthier_middle(heads, rule.is_low)}


def _healthier_middle(by_head: dict[int, float], is_low: bool) -> float:
    """The median; of an even number of heads the healthier one: most of them must be ill."""
    known = sorted(value for value in by_head.values() if not math.isnan(value))
    if not known:
        return math.nan
    return known[len(known) // 2] if is_low else known[(len(known) - 1) // 2]


def _is_ill(rule: Rule, value: float) -> bool:
    return value <= rule.threshold if rule.is_low else value >= rule.threshold


def verdict(findings: list[Finding], num_layers: int, num_unmeasured: int) -> str:
    """Say in a sentence how the model is.

    Args:
        findings: As ``judge`` returns them.
        num_layers: Attentions of the model.
        num_unmeasured: Of these, how many no call was seen of.

    Returns:
        The sentence.
    """
    looked = f"{num_layers - num_unmeasured} of {num_layers} attention layers looked at"
    counts = {s: [f for f in findings if f.severity == s] for s in SEVERITIES}
    for severity, word in (("severe", "Unhealthy"), ("warning", "Needs a look")):
        if counts[severity]:
            first = counts[severity][0]
            kinds = list(dict.fromkeys(f.kind.replace("_", " ") for f in counts[severity]))
            return f"{word}: {', '.join(kinds)}; first at {first.where} ({looked})."
    if num_unmeasured == num_layers:
        return f"Nothing could be measured on this batch ({looked})."
    notes = len(counts["note"])
    return f"Healthy: nothing above its threshold ({looked}, {notes} notes)."
