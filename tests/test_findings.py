"""Every finding fires on a model made sick in that way, and stays silent on its healthy twin."""

import math
from pathlib import Path

import pytest
import torch
from torch import nn

from hosts import HOSTS
from levelhead.attention import Attention
from levelhead.diagnose import diagnose
from levelhead.diagnosis import WHOLE_LAYER, Record
from levelhead.findings import DEAD_THETA, LIVE_THETA, RULES, judge, verdict

EMBED, HEADS, TOKENS = 44, 4, 23


class Block(nn.Module):
    """A pre-LN or post-LN layer around one attention."""

    def __init__(self, is_post: bool = False):
        super().__init__()
        self.attn, self.norm = Attention(EMBED, HEADS), nn.LayerNorm(EMBED)
        self.is_post = is_post

    def forward(self, hidden_states):
        if self.is_post:
            return self.norm(hidden_states + self.attn(hidden_states))
        return hidden_states + self.attn(self.norm(hidden_states))


def model(num_layers: int = 2, is_post: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(is_post) for _ in range(num_layers))).eval()


def batch() -> torch.Tensor:
    return torch.randn(2, TOKENS, EMBED, generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def scaled(part, factor):
    """Multiply a projection of the first layer."""
    sick = model()
    getattr(sick[0].attn, part).weight.mul_(factor)
    return sick, batch()


@torch.no_grad()
def nan_weight():
    sick = model()
    sick[0].attn.k_proj.weight[3, 5] = math.nan
    return sick, batch()


@torch.no_grad()
def infinite_input():
    sick = model()
    sick[0].norm.bias[3] = math.inf
    return sick, batch()


@torch.no_grad()
def dead_head():
    sick = model()
    sick[0].attn.o_proj.weight.view(EMBED, HEADS, -1)[:, 2].mul_(1e-4)
    return sick, batch()


@torch.no_grad()
def sink():
    """Every query and the first key point the same way, more than any other key."""
    sick, states = model(), batch()
    attn, direction = sick[0].attn, torch.zeros(EMBED)
    direction[:: EMBED // HEADS] = 3.0  # the first channel of every head
    attn.q_proj.weight.zero_()
    attn.q_proj.bias = nn.Parameter(direction)
    first = nn.functional.layer_norm(states[:, 0], [EMBED]).mean(0)
    attn.k_proj.weight.mul_(0.1)
    attn.k_proj.weight[:: EMBED // HEADS] += 6 * first / first.square().sum()
    states[:, 0] = states[0, 0]
    return sick, states


class Repeating(nn.Sequential):
    """Reads words; the stream holds each word and the word before it."""

    def forward(self, ids):
        words = nn.functional.one_hot(ids, EMBED // HEADS).float()
        before = torch.cat([torch.zeros_like(words[:, :1]), words[:, :-1]], 1)
        states = torch.cat([words, before, 0.1 * words, 0.1 * before], -1)
        for block in self:
            states = states + block.attn(states, is_causal=True)
        return states


@torch.no_grad()
def induction():
    """Head 2 asks with the word for the same word before."""
    torch.manual_seed(0)
    sick, width = Repeating(Block(), Block()), EMBED // HEADS
    head = slice(2 * width, 3 * width)
    for part, start in (("q_proj", 0), ("k_proj", width)):
        weight = getattr(sick[0].attn, part).weight
        weight[head] = 0
        weight[head, start : start + width] = 4 * torch.eye(width)
    words = torch.stack([torch.randperm(width) for _ in range(2)])
    return sick.eval(), torch.cat([words, words], 1)


@torch.no_grad()
def low_rank(part, nth):
    sick = model()
    weight = getattr(sick[0].attn, f"{part}_proj").weight
    by_head = weight.view(HEADS, -1, EMBED) if part != "o" else weight.view(EMBED, HEADS, -1)
    head = by_head[nth] if part != "o" else by_head[:, nth]
    u, s, vh = torch.linalg.svd(head, full_matrices=False)
    s[-1] = s[0] / 5000
    head.copy_(u * s @ vh)
    return sick, batch()


@torch.no_grad()
def contracting():
    sick = model(6, is_post=True)
    for block in sick:
        block.attn.v_proj.weight.mul_(30.0)
        block.attn.o_proj.weight.mul_(30.0)
    return sick, batch()


@torch.no_grad()
def outliers():
    sick = model()
    for block in sick:
        block.norm.weight[7] = 40.0
        block.attn.q_proj.weight[:, 7] = block.attn.k_proj.weight[:, 7] = 0.0
    return sick, batch()


def overflow_in_half():
    """|query . key| beyond 65504 before a scale that tames it, as under float16 autocast."""
    sick, states = scaled("q_proj", 4e4)
    sick[0].attn.inner.scale = 1e-6
    return sick, states


SICK = {
    ("nonfinite_weights", "severe"): nan_weight,
    ("nonfinite_scores", "severe"): infinite_input,
    ("overflow", "warning"): overflow_in_half,
    ("exploding_scores", "severe"): lambda: scaled("q_proj", 1e5),
    ("exploding_scores", "warning"): lambda: scaled("q_proj", 150.0),
    ("saturated_softmax", "severe"): lambda: scaled("q_proj", 60.0),
    ("saturated_softmax", "warning"): lambda: scaled("q_proj", 30.0),
    ("entropy_collapse", "warning"): lambda: scaled("q_proj", 150.0),
    ("sink", "note"): sink,
    ("induction_head", "note"): induction,
    ("dead_head", "warning"): dead_head,
    ("ill_conditioned_q", "warning"): lambda: low_rank("q", 0),
    ("ill_conditioned_k", "warning"): lambda: low_rank("k", 1),
    ("ill_conditioned_v", "warning"): lambda: low_rank("v", 2),
    ("ill_conditioned_o", "warning"): lambda: low_rank("o", 3),
    ("contracting_post_ln", "warning"): contracting,
    ("outlier_channels", "warning"): outliers,
}  # fmt: skip


def found(diagnosis, layer=None):
    return {(f.kind, f.severity) for f in diagnosis.findings if layer in (None, f.layer)}


@pytest.mark.parametrize(("kind", "severity"), SICK)
@pytest.mark.filterwarnings("ignore:.*converged")
def test_a_finding_fires_where_it_must_and_only_there(kind, severity):
    diagnosis = diagnose(*SICK[kind, severity](), jacobian_tokens=0)
    assert (kind, severity) in found(diagnosis)
    whole_model = {"contracting_post_ln", "outlier_channels"}
    spreads = {"nonfinite_weights", "nonfinite_scores", "exploding_scores"}
    if kind not in whole_model | spreads:
        assert not [f for f in diagnosis.findings if f.kind == kind and f.layer == "1.attn"]
    named = next(f for f in diagnosis.findings if (f.kind, f.severity) == (kind, severity))
    assert named.layer == ("" if kind in whole_model else "0.attn")
    assert named.source
    assert named.advice
    assert kind.replace("_", " ") in diagnosis.verdict or severity == "note" or diagnosis.is_severe


def test_the_worst_head_is_named():
    for part, nth in (("q", 0), ("k", 1), ("v", 2), ("o", 3)):
        diagnosis = diagnose(*low_rank(part, nth), jacobian_tokens=0)
        finding = next(f for f in diagnosis.findings if f.kind == f"ill_conditioned_{part}")
        assert (finding.layer, finding.head, finding.num_heads) == ("0.attn", nth, 1)
        assert finding.value == pytest.approx(5000, rel=1e-2)
    finding = next(f for f in diagnose(*dead_head()).findings if f.kind == "dead_head")
    assert (finding.layer, finding.head) == ("0.attn", 2)


def test_the_induction_head_is_named_and_words_said_once_have_none():
    sick, ids = induction()
    finding = next(f for f in diagnose(sick, ids).findings if f.kind == "induction_head")
    assert (finding.layer, finding.head, finding.num_heads) == ("0.attn", 2, 1)
    assert finding.value > 0.6
    once = diagnose(sick, ids[:, : ids.shape[1] // 2], jacobian_tokens=0)
    assert "induction_mean" not in {record.metric for record in once.records}


@pytest.mark.parametrize("is_post", [False, True])
def test_the_healthy_twins_have_no_finding(is_post):
    diagnosis = diagnose(model(is_post=is_post), batch())
    assert diagnosis.findings == []
    assert diagnosis.verdict.startswith("Healthy")


@pytest.mark.parametrize("name", ["gpt2", "bert", "llama", "t5", "timm_vit", "swin", "swin_v2",
                                  "davit", "xcit", "torch_encoder", "whisper"])  # fmt: skip
def test_freshly_built_models_are_healthy(name):
    diagnosis = diagnose(HOSTS[name].build(), HOSTS[name].batch(), jacobian_tokens=0)
    assert diagnosis.findings == []


def test_every_rule_of_the_table_is_tried():
    tried = set(SICK) | {("overflow", "severe")}  # needs float16: test_diagnose
    assert {(rule.kind, rule.severity) for rule in RULES} == tried


def test_the_page_holds_the_table_of_thresholds():
    page = (Path(__file__).parents[1] / "docs" / "diagnosing.md").read_text()
    of = {"head": "each head", "median": "the median head", "layer": "the layer or model"}
    for rule in RULES:
        sign = "<=" if rule.is_low else ">="
        cells = [
            rule.kind.replace("_", " "), rule.severity, f"`{rule.metric}`",
            f"{sign} {rule.threshold:g}", of[rule.per], rule.source,
        ]  # fmt: skip
        assert f"| {' | '.join(cells)} |" in page
    header = "| finding | severity | number | threshold | of | source |"
    rows = page.split(header)[1].split("\n\n")[0].splitlines()[2:]
    assert len(rows) == len(RULES)


def records(metric, *values, head=0, **whole):
    made = [Record("layer", 0, head + i, metric, v, "") for i, v in enumerate(values)]
    whole_layer = [Record("layer", 0, WHOLE_LAYER, name, v, "") for name, v in whole.items()]
    return made + whole_layer


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: f"{rule.kind}-{rule.severity}")
def test_thresholds_cut_where_they_say(rule):
    at, beside = rule.threshold, rule.threshold * (1.001 if rule.is_low else 0.999)
    one_key = [Record("layer", 0, 0, "p_max_mean", 0.9, "")]
    for value, fires in ((at, True), (beside, False), (math.nan, False)):
        head = WHOLE_LAYER if rule.per == "layer" else 0
        made = [Record("layer", 0, head, rule.metric, value, "")]
        made += [*records("x", num_keys=99), *one_key]
        told = {(f.kind, f.severity) for f in judge(made)}
        assert ((rule.kind, rule.severity) in told) == fires


def test_the_severe_come_first_and_only_once_a_head():
    made = records("score_max_max", 2e4, 500.0, 3.0)
    told = judge(made)
    assert [(f.severity, f.head, f.num_heads) for f in told] == [
        ("severe", 0, 1), ("warning", 1, 1),
    ]  # fmt: skip


def test_few_keys_are_no_sink():
    assert not judge(records("sink_mass_mean", 0.5, num_keys=15))
    assert judge(records("sink_mass_mean", 0.5, num_keys=16))


def kinds(*records_of):
    return {finding.kind for made in [sum(records_of, [])] for finding in judge(made)}


@pytest.mark.parametrize(
    ("thetas", "is_saturated"),
    [
        ((0.01, 0.01, 0.9), True),  # two of three
        ((0.01, 0.01, 0.9, 0.9), False),  # half of the heads may look at one key by trade
        ((0.01, 0.01, 0.01, 0.9), True),
        ((0.01, 0.9, 0.9, 0.9), False),
        ((0.01, math.nan, math.nan), True),
        ((math.nan, math.nan), False),
    ],
)
def test_most_heads_must_be_saturated(thetas, is_saturated):
    assert (kinds(records("theta_upper_q50", *thetas)) != set()) == is_saturated


def test_a_collapse_is_told_where_rows_rest_on_one_key_and_else_not():
    entropy = records("normalized_entropy_mean", 0.05, 0.05, 0.05, 0.9)
    assert kinds(entropy, records("p_max_mean", 0.99, 0.9, 0.86, 0.2)) == {"entropy_collapse"}
    assert kinds(entropy, records("p_max_mean", 0.99, 0.9, 0.80, 0.2)) == set()
    assert kinds(entropy) == set()  # a monitor that was told not to measure p_max


def looking_at(num_keys, *scores_of_best):
    """One head; every query gives its best keys these scores, all others zero."""
    width = 16
    attn = Attention(width, 1)
    states = 0.02 * torch.randn(1, num_keys, width, generator=torch.Generator().manual_seed(2))
    for place, score in enumerate(scores_of_best):
        states[0, place, 1 + place] = score
    states[..., 0] = 1.0
    with torch.no_grad():
        for part in (attn.q_proj, attn.k_proj, attn.v_proj, attn.o_proj):
            part.weight.copy_(torch.eye(width))
        attn.q_proj.weight.zero_()
        attn.q_proj.weight[1:, 0] = width**0.5
        attn.k_proj.weight[0, 0] = 0.0
    return nn.Sequential(attn).eval(), states


def test_long_rows_that_choose_among_few_keys_are_not_collapsed():
    """Two of 2,003 keys: a twelfth of ln(keys), and as much gradient as a row can pass."""
    for scores, told in (((30.0, 30.0), False), ((60.0, 30.0), True)):
        diagnosis = diagnose(*looking_at(2003, *scores), jacobian_tokens=0)
        assert diagnosis.value("normalized_entropy_mean", "0", 0) < 0.1
        collapse = {"saturated_softmax", "entropy_collapse"}
        kinds_found = {finding.kind for finding in diagnosis.findings}
        assert collapse & kinds_found == (collapse if told else set())


@pytest.mark.parametrize("num_tokens", [1, 2])
def test_a_row_with_one_key_to_look_at_is_not_saturated(num_tokens):
    """The first row of a causal model passes no gradient, and need not."""
    gpt2 = HOSTS["gpt2"]
    diagnosis = diagnose(gpt2.build(), {"input_ids": torch.full((3, num_tokens), 5)})
    assert diagnosis.findings == []
    layer = next(record.layer for record in diagnosis.records if record.layer)
    theta = diagnosis.value("theta_upper_q10", layer, 0)
    assert math.isnan(theta) if num_tokens == 1 else theta > LIVE_THETA


@pytest.mark.parametrize(("factor", "is_ill"), [(1.0, False), (60.0, True)])
def test_theta_where_rows_are_gaussian(factor, is_ill):
    """Source of the two thresholds: theta = 4 p (1 - p) of a largest weight p >= 1/2."""
    for theta, p_max in ((LIVE_THETA, 0.854), (DEAD_THETA, 0.974)):
        assert 4 * p_max * (1 - p_max) == pytest.approx(theta, abs=2e-3)
    sick, states = scaled("q_proj", factor)
    diagnosis = diagnose(sick, states, jacobian_tokens=0)
    thetas = [diagnosis.value("theta_upper_q50", "0.attn", head) for head in range(HEADS)]
    assert (max(thetas) < DEAD_THETA) == is_ill
    assert (min(thetas) > LIVE_THETA) == (not is_ill)


def test_the_verdict_says_what_was_looked_at():
    assert "2 of 3" in verdict([], 3, 1)
    assert verdict([], 3, 3).startswith("Nothing could be measured")
