"""What ``diagnose`` measures agrees with plain torch, and it says what it could not measure."""

import json
import logging
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from capturing import assert_put_back
from hosts import HOSTS, tokens
from levelhead import cli
from levelhead.attention import Attention
from levelhead.bench.timing import peak_extra_bytes
from levelhead.capture import capture
from levelhead.commands import app
from levelhead.convert import convert
from levelhead.diagnose import diagnose, together
from levelhead.diagnose_calls import block_outputs, scores_of, weight_blocks
from levelhead.diagnose_command_batch import made_batch
from levelhead.diagnose_command_models import load_named
from levelhead.diagnose_rows import SiteRows, reduce_rows
from levelhead.diagnosis import Diagnosis
from levelhead.sites.calls import AttentionCall
from levelhead.sites.find import find_attention


class QKNormed(nn.Module):
    """Attention whose queries and keys have unit root mean square, with any scale."""

    def __init__(self, embed_dim, scale):
        super().__init__()
        self.attn = Attention(embed_dim, 1)
        self.attn.inner.scale = scale
        nn.init.eye_(self.attn.q_proj.weight)
        for part in (self.attn.k_proj, self.attn.v_proj, self.attn.o_proj):
            nn.init.orthogonal_(part.weight)

    def forward(self, hidden_states):
        return self.attn(hidden_states)


def rms_normed(num_tokens, embed_dim):
    states = torch.randn(1, num_tokens, embed_dim, generator=torch.Generator().manual_seed(3))
    return states / states.square().mean(-1, keepdim=True).sqrt()


def test_case_a18_saturation_names_the_scale():
    found = {}
    for scale in (1.0, 1 / 16):
        diagnosis = diagnose(QKNormed(256, scale), rms_normed(128, 256), jacobian_tokens=0)
        found[scale] = diagnosis
        entropy_bits = diagnosis.value("entropy_nats_mean", "attn", 0) / math.log(2)
        score_std = diagnosis.value("score_std_q50", "attn", 0)
        # the figures of the report: logit std 16 against 1, entropy 0.4 against 6.3 bits
        assert score_std == pytest.approx(16 * scale, rel=0.1)
        assert entropy_bits == pytest.approx({1.0: 0.4, 1 / 16: 6.3}[scale], abs=0.15)
    assert [finding.kind for finding in found[1 / 16].findings] == []
    first = found[1.0].findings[0]
    assert (first.kind, first.layer) == ("saturated_softmax", "attn")
    assert "probable cause: the scale is 1, where 1/sqrt(head_dim) is 0.0625" in first.meaning
    # a mean would hide it: the saturated rows have the lower median and the far higher tail
    for scale, expected in ((1.0, (0.00, 0.03, 0.41, 0.49)), (1 / 16, (0.04, 0.06, 0.10, 0.14))):
        for quantile, value in zip(("q10", "q50", "q90", "q99"), expected, strict=True):
            norm = found[scale].value(f"softmax_norm_{quantile}", "attn", 0)
            assert norm == pytest.approx(value, abs=0.03), (scale, quantile)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_case_a17_overflow_is_told_before_anything_is_nan(dtype):
    model = nn.Sequential(Attention(33, 3), Attention(33, 3)).to(dtype).eval()
    states = torch.randn(2, 11, 33, generator=torch.Generator().manual_seed(1)).to(dtype)
    with torch.no_grad():
        model[0].inner.scale = 1e-5
        model[0].q_proj.weight.view(3, 11, 33)[1] *= 400
        model[0].k_proj.weight.view(3, 11, 33)[1] *= 400
    diagnosis = diagnose(model, states, jacobian_tokens=0)
    first = next(finding for finding in diagnosis.findings if finding.kind == "overflow")
    raw = diagnosis.value("raw_score_max", "0", 1)
    assert raw > 65504
    assert diagnosis.value("nonfinite_rows", "0") == 0
    assert (first.layer, first.head) == ("0", 1)
    assert "logit overflow" in first.meaning
    if dtype == torch.float16:
        assert (first.severity, first.metric) == ("severe", "overflow_frac")
        assert first.value == pytest.approx(raw / 65504)
        assert diagnosis.is_severe
    else:
        assert (first.severity, first.metric, first.value) == ("warning", "raw_score_max", raw)


def test_case_a13_statistics_of_a_long_sequence_by_blocks():
    generator = torch.Generator().manual_seed(0)
    shape = (1, 3, 1024, 16)
    query, key, value = (torch.randn(shape, generator=generator) for _ in range(3))
    model = nn.Sequential(Attention(48, 3))
    site = find_attention(model)[0]
    rows = SiteRows(site, num_queries=None)
    rows.add(AttentionCall(site, 0, query, key, value, 0.25, is_causal=True))
    records = {(r.head, r.metric): r.value for r in rows.records()}
    scores = 0.25 * query.double() @ key.double().mT
    scores = scores.masked_fill(torch.ones(1024, 1024).triu(1).bool(), -torch.inf)
    weights = scores.softmax(-1)[0, :, 1:]
    entropy = -torch.special.xlogy(weights, weights).sum(-1)
    for head in range(3):
        assert abs(records[head, "entropy_nats_mean"] - entropy[head].mean()) < 1e-4
        assert abs(records[head, "sink_mass_mean"] - weights[head, :, 0].mean()) < 1e-6
        assert records[head, "score_max_max"] == pytest.approx(float(scores[0, head].max()))
        assert records[head, "p_max_mean"] == pytest.approx(
            weights[head].amax(-1).mean().item(), rel=1e-5
        )
        for level in (10, 50, 90):
            expected = entropy[head].quantile(level / 100).item()
            assert records[head, f"entropy_nats_q{level}"] == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_case_a13_memory_stays_below_a_tenth_of_the_scores(dtype):
    generator = torch.Generator().manual_seed(0)
    query, key, value = torch.randn(3, 1, 4, 4096, 64, generator=generator).to(dtype)
    site = find_attention(nn.Sequential(Attention(256, 4)))[0]
    rows = SiteRows(site, num_queries=128)
    call = AttentionCall(site, 0, query, key, value, 0.125, is_causal=True)
    assert peak_extra_bytes(lambda: rows.add(call)) < 0.1 * 4 * 4096**2 * 4
    assert (rows.num_looked_at, rows.num_tokens) == (128, 4096)
    assert any("rows of 128 of 4096 queries" in record.convention for record in rows.records())


@torch.no_grad()
def test_the_share_of_a_head_is_that_of_its_output():
    torch.manual_seed(0)
    model = nn.Sequential(Attention(33, 3).double())
    states, calls = torch.randn(2, 7, 33, dtype=torch.float64), []
    with capture(model, calls.append):
        model(states)
    outputs = torch.empty(2, 3, 7, 11, dtype=torch.float64)
    for block, weights in weight_blocks(scores_of(calls[0]), torch.arange(7)):
        part = block_outputs(block, weights, calls[0].value, group=1)
        outputs[block.batch, block.heads] = part
    expected = nn.functional.scaled_dot_product_attention(
        calls[0].query, calls[0].key, calls[0].value
    )
    torch.testing.assert_close(outputs, expected, atol=1e-12, rtol=0)
    o_weight = model[0].o_proj.weight.view(33, 3, 11)
    parts = torch.einsum("bhtd,ehd->bhte", expected, o_weight)
    size = parts.square().sum((0, 2, 3)).sqrt()
    share = size / size.square().mean().sqrt()
    diagnosis = diagnose(model, states)
    for head in range(3):
        assert diagnosis.value("output_share", "0", head) == pytest.approx(float(share[head]))


def test_grouped_heads_and_sinks_agree_with_the_host():
    for name in ("llama", "gpt_oss"):
        model = HOSTS[name].build()
        diagnosis = diagnose(model, tokens())
        site = find_attention(model)[0]
        frame = diagnosis.frame()
        heads = frame[(frame.layer == site.name) & (frame.metric == "kappa_k")]
        assert sorted(heads["head"]) == list(range(site.num_heads))
        assert heads.value.nunique() == site.num_kv_heads
        mass = diagnosis.value("row_mass_mean", 0, 0)
        assert mass < 1 if site.has_sink else mass == pytest.approx(1)


@pytest.mark.parametrize("name", ["gpt2", "timm_vit", "swin", "torch_encoder"])
def test_the_model_is_as_it_was(name):
    model = HOSTS[name].build().train()
    next(model.modules()).training = True
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    frozen = next(module for module in model.modules() if not list(module.children()))
    frozen.eval()
    state = torch.get_rng_state()
    diagnose(model, HOSTS[name].batch())
    assert torch.equal(state, torch.get_rng_state())
    assert_put_back(model)
    assert model.training
    assert not frozen.training
    for key, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[key])


def test_jacobians_stand_beside_the_bound_and_the_surrogate():
    model = nn.Sequential(Attention(33, 3)).eval()
    states = torch.randn(2, 7, 33, generator=torch.Generator().manual_seed(1))
    diagnosis = diagnose(model, states, jacobian_tokens=5)
    for head in range(3):
        kappa = diagnosis.value("jacobian_kappa", "0", head)
        assert 1 <= kappa <= diagnosis.value("jacobian_bound", "0", head) * (1 + 1e-9)
        assert diagnosis.value("jacobian_surrogate", "0", head) > 1
    frame = diagnosis.frame()
    words = dict(zip(frame.metric, frame.convention, strict=True))
    assert "first 5 tokens" in words["jacobian_kappa"]
    assert "not a bound" in words["jacobian_surrogate"]
    assert "jacobian_kappa" not in set(diagnose(model, states, jacobian_tokens=0).frame().metric)


def test_what_cannot_be_measured_is_said():
    assert "rotary embedding" in str(diagnose(HOSTS["llama"].build(), tokens()))
    model = HOSTS["timm_vit"].build()
    convert(model, "quest")
    reasons = diagnose(model, HOSTS["timm_vit"].batch()).meta["not_measured"]
    assert any("Jacobian" in reason and "variant" in reason for reason in reasons)


def test_a_refused_batch_still_leaves_the_weights():
    diagnosis = diagnose(HOSTS["timm_vit"].build(), torch.randn(2, 3, 17, 17))
    assert diagnosis.verdict == "Nothing could be measured on this batch (0 of 2 attention " \
        "layers looked at)."  # fmt: skip
    assert any("give a batch that VisionTransformer takes" in r for r in
               diagnosis.meta["not_measured"])  # fmt: skip
    assert diagnosis.value("kappa_q", 0, 1) > 1
    without = diagnose(HOSTS["timm_vit"].build())
    assert any("no batch was given" in reason for reason in without.meta["not_measured"])


@torch.no_grad()
def test_weights_with_nan_are_severe_and_named():
    model = HOSTS["timm_vit"].build()
    model.blocks[1].attn.qkv.weight[50, 3] = math.nan  # rows 45 .. 89 are the keys'
    diagnosis = diagnose(model, HOSTS["timm_vit"].batch())
    first = diagnosis.findings[0]
    assert (first.kind, first.severity, first.layer) == (
        "nonfinite_weights", "severe", "blocks.1.attn",
    )  # fmt: skip
    assert diagnosis.value("entropy_nats_mean", 0, 0) > 0  # the layer before is measured
    heads = {f.head for f in diagnosis.findings if f.kind == "nonfinite_scores"}
    assert heads == {0}
    json.dumps(diagnosis.summary(), allow_nan=False)


@pytest.mark.parametrize(("options", "words"), [
    ({"num_queries": 0}, "num_queries must be at least 1"),
    ({"jacobian_tokens": -1}, "jacobian_tokens must be at least 0"),
])  # fmt: skip
def test_numbers_out_of_range_are_refused(options, words):
    with pytest.raises(ValueError, match=words):
        diagnose(HOSTS["timm_vit"].build(), None, **options)


def test_a_model_without_attention_is_refused():
    with pytest.raises(ValueError, match="no attention found"):
        diagnose(nn.Linear(3, 3), torch.randn(2, 3))


def test_it_comes_back_from_json(tmp_path):
    diagnosis = diagnose(
        HOSTS["gpt2"].build(), tokens(), curves={"loss": [(0, math.nan), (1, 2.0)]}
    )
    diagnosis.to_json(tmp_path / "d.json")
    again = Diagnosis.from_json(tmp_path / "d.json")
    assert again.findings == diagnosis.findings
    assert str(again) == str(diagnosis)
    assert again.frame().equals(diagnosis.frame())
    assert math.isnan(again.curves["loss"][0][1])
    (tmp_path / "no.json").write_text("{}")
    with pytest.raises(ValueError, match="must be a diagnosis"):
        Diagnosis.from_json(tmp_path / "no.json")
    with pytest.raises(ValueError, match="no 'nothing' of layer 0, head -1; metrics: .*kappa_q"):
        diagnosis.value("nothing", 0)


def test_the_report_opens_with_the_verdict(tmp_path):
    diagnosis = diagnose(HOSTS["gpt2"].build(), tokens())
    diagnosis.to_html(tmp_path / "report.html")
    assert diagnosis.verdict.split(" (")[0] in (tmp_path / "report.html").read_text()


def test_statistics_of_no_rows_and_of_infinite_rows():
    assert all(math.isnan(value) for value in reduce_rows(torch.empty(2, 0), "q50"))
    values = torch.tensor([[1.0, math.nan, -math.inf], [math.nan] * 3])
    largest = reduce_rows(values, "max")
    assert largest[0] == 1.0
    assert math.isnan(largest[1])


def test_reasons_are_told_once():
    said = together(["a: what: why", "b: what: why", "c: what: other"])
    assert said == ["a: what: why (and 1 other layers)", "c: what: other"]


@pytest.mark.parametrize("name", ["gpt2", "bert", "vit", "clip", "whisper", "t5", "timm_vit"])
def test_a_batch_is_made_that_the_model_takes(name):
    model = HOSTS[name].build()
    batch, origin = made_batch(model)
    assert origin.startswith("made: random")
    diagnosis = diagnose(model, batch, jacobian_tokens=0, num_queries=8)
    assert not any("forward" in reason for reason in diagnosis.meta["not_measured"])


def healthy():
    """For the command line: a model and a batch."""
    return HOSTS["timm_vit"].build(), HOSTS["timm_vit"].batch()


@torch.no_grad()
def sick():
    """For the command line: a severe finding."""
    model, batch = healthy()
    model.blocks[0].attn.qkv.weight[0, 0] = math.nan
    return model, batch


def wrong_batch():
    """For the command line: a batch that the model refuses."""
    return HOSTS["timm_vit"].build(), torch.randn(1, 2)


@pytest.mark.parametrize(("which", "code"), [("healthy", 0), ("sick", 1), ("wrong_batch", 2)])
def test_the_command_line_says_it_with_its_exit_code(which, code, tmp_path):
    out = tmp_path / "report.html"
    arguments = ["diagnose", f"test_diagnose:{which}", "--out", str(out), "--json"]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == code, done.output
    summary = json.loads(done.stdout)
    assert summary["meta"]["batch_from"] == f"from test_diagnose:{which}"
    assert out.exists()
    assert (code == 1) == any(f["severity"] == "severe" for f in summary["findings"])


def test_folders_of_transformers_runs_and_text_files(tmp_path):
    HOSTS["gpt2"].build().save_pretrained(tmp_path / "gpt2")
    loaded = load_named(str(tmp_path / "gpt2"), None)
    assert set(loaded.batch) == {"input_ids"}
    data = tmp_path / "batch.safetensors"
    from safetensors.torch import save_file

    save_file(tokens(), data)
    loaded = load_named(str(tmp_path / "gpt2"), data)
    assert torch.equal(loaded.batch["input_ids"], tokens()["input_ids"])
    assert loaded.origin == f"read from {data}"
    (tmp_path / "batch.xyz").write_text("")
    with pytest.raises(ValueError, match="--data must be of a known kind, got batch.xyz"):
        load_named(str(tmp_path / "gpt2"), tmp_path / "batch.xyz")


def test_a_run_of_the_comparison_opens_to_a_verdict(tmp_path, monkeypatch):
    from levelhead.harness import step_times

    monkeypatch.setattr(step_times, "TIMING_ROUNDS", 2)
    arguments = ["compare", "--data", "digits", "--variants", "quest", "--seeds", "1", "--steps",
                 "3", "--workers", "1", "--model", "vit(embed_dim=12, num_heads=2, num_layers=1)",
                 "--out", str(tmp_path / "run")]  # fmt: skip
    assert CliRunner().invoke(app, arguments).exit_code == 0
    loaded = load_named(str(tmp_path / "run"), None)
    assert [step for step, _ in loaded.curves["train_loss_nats"]] == [1, 2, 3]
    out = tmp_path / "report.html"
    done = CliRunner().invoke(app, ["diagnose", str(tmp_path / "run"), "--out", str(out)])
    assert done.exit_code == 0
    assert done.output.startswith(("Healthy", "Needs a look"))
    assert "trained again as it was" in done.output


def test_the_run_is_trained_again_to_the_same_numbers(tmp_path):
    from levelhead.diagnose_command_models import trained
    from levelhead.harness.config import Cell
    from levelhead.harness.tasks import make_task, resolve_task
    from levelhead.harness.train import train_cell

    options = {"vit": {"embed_dim": 12, "num_heads": 2, "num_layers": 1}}
    task = make_task(resolve_task("digits", options, steps=5))
    cell = Cell(task=task.settings.name, variant="softmax", init="default", seed=0)
    assert task.evaluate(trained(task, cell).eval()) == train_cell(task, cell)["final"]


@pytest.mark.parametrize(("name", "words"), [
    ("./nowhere", "MODEL must be a folder that exists"),
    ("runs/nowhere", "MODEL must be a folder that exists"),
    ("model.pt", "MODEL must be a folder that exists"),
    ("no_such_module:function", "must name a function as module:function"),
    ("test_diagnose:no_such", "must name a function as module:function"),
    ("builtins:dict", "must return a module"),
])  # fmt: skip
def test_unknown_models_are_refused_in_words(name, words):
    with pytest.raises(ValueError, match=words):
        load_named(name, None)


def test_corrupt_checkpoints_are_refused_in_words(tmp_path):
    with pytest.raises(ValueError, match="has none of them"):
        load_named(str(tmp_path), None)
    HOSTS["gpt2"].build().save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"torn")
    with pytest.raises(ValueError, match="could not be loaded"):
        load_named(str(tmp_path), None)


@pytest.mark.parametrize("name", ["batch.npy", "batch.safetensors"])
def test_a_corrupt_batch_is_refused_with_its_name(tmp_path, name):
    (tmp_path / name).write_bytes(b"torn")
    with pytest.raises(ValueError, match=f"--data .*{name} could not be read .*; give a .safeten"):
        load_named("test_diagnose:healthy", tmp_path / name)


def needs_an_argument(model):
    """For the command line: not to be called without."""
    return model


def test_a_function_that_wants_arguments_is_refused():
    with pytest.raises(ValueError, match="must be called without arguments; missing a required"):
        load_named("test_diagnose:needs_an_argument", None)


def test_a_report_that_has_no_folder_is_refused_before_the_work(tmp_path, capsys):
    out = tmp_path / "nowhere" / "report.html"
    code = cli.main(["diagnose", "test_diagnose:healthy", "--out", str(out)])
    assert code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "--out must be a file in a folder that exists" in captured.err


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="no folder that takes no file")
def test_a_report_that_cannot_be_written_is_refused_before_the_work(capsys):
    assert cli.main(["diagnose", "test_diagnose:healthy", "--out", "/proc/report.html"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert re.fullmatch(r"levelhead: .*: /proc/report.html\n", captured.err)


def test_a_name_that_cannot_be_downloaded_is_one_line(capsys, monkeypatch):
    """The hub warns of each attempt; only what is wrong is told, and its logger left as it was."""
    transformers = pytest.importorskip("transformers")
    logger = logging.getLogger("huggingface_hub")
    level = logger.level

    def unreachable(name):
        logger.warning("Retrying in 1s [Retry 1/5].")
        raise OSError("no network")

    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", unreachable)
    code = cli.main(["diagnose", "nobody/nothing"])
    err = capsys.readouterr().err
    assert (code, err.count("\n")) == (2, 1)
    assert "nobody/nothing could not be loaded (OSError: no network); check the name" in err
    assert logger.level == level


def test_the_hub_is_quiet_too_when_it_is_imported_late():
    """As on the command line, where nothing has imported it yet: it sets its level then."""
    pytest.importorskip("huggingface_hub")
    code = (
        "import logging; from levelhead.diagnose_command_models import _quiet_hub\n"
        "with _quiet_hub():\n"
        "    import huggingface_hub.utils.logging\n"
        "    print(logging.getLogger('huggingface_hub.utils').isEnabledFor(logging.WARNING))\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "False"


def test_the_command_has_help_with_an_example():
    assert CliRunner().invoke(app, ["diagnose", "--help"]).output.count("levelhead diagnose") >= 1
