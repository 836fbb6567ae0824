"""The monitor sees what training does, says where it breaks first, and leaves no trace."""

import json
import math
import os
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn

from capturing import assert_put_back
from hosts import HOSTS, run, tokens
from levelhead.attention import Attention
from levelhead.measure.spikes import SPIKE_ENOUGH, is_spike, running_spikes
from levelhead.monitor import Monitor
from levelhead.monitor_alerts import Watch
from levelhead.monitor_gradients import gradient_squares
from levelhead.monitor_sites import scalars
from levelhead.monitor_writers import as_writer
from ranks import on_ranks


class Net(nn.Module):
    """Two residual attention layers with a readout."""

    def __init__(self, embed_dim=33, num_heads=3):
        super().__init__()
        self.layers = nn.ModuleList(Attention(embed_dim, num_heads) for _ in range(2))

    def forward(self, hidden_states):
        for layer in self.layers:
            hidden_states = hidden_states + layer(hidden_states)
        return hidden_states.square().mean()


@pytest.fixture
def net():
    return Net()


@pytest.fixture
def path(tmp_path):
    return tmp_path / "logs" / "monitor.jsonl"


def states(seed=0, batch=2):
    return torch.randn(batch, 7, 33, generator=torch.Generator().manual_seed(seed))


def train(model, monitor, steps, optimizer=None, feed=states, micro=1):
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=1e-3)
    for step in range(steps):
        optimizer.zero_grad()
        for part in range(micro):
            loss = model(feed(step * micro + part))
            loss.backward()
            monitor.note(loss=loss)
        optimizer.step()


def events(path, kind=None):
    read = [json.loads(line) for line in path.read_text().splitlines()]
    return [event for event in read if kind in (None, event["event"])]


def test_a_plain_loop_writes_scalars_at_its_cadence(net, path):
    written = {}
    with Monitor(net, every=3, writer=written.__setitem__, jsonl=path) as monitor:
        train(net, monitor, 7)
    assert list(written) == monitor.measured_steps == [0, 3, 6]
    names = set(written[0])
    for metric in ("entropy_nats", "p_max", "score_max", "sink_mass", "score_std"):
        for which in ("0", "1", "2", "mean", "max", "q99"):
            assert f"attn/layers.1/{which}/{metric}" in names
    assert {"train/loss", "train/grad_norm"} <= names
    logged = events(path, "scalars")
    assert [event["step"] for event in logged] == [0, 3, 6]
    assert logged[1]["values"] == pytest.approx(written[3])
    assert {event["mode"] for event in logged} == {"live"}
    assert_put_back(net)


def test_without_metrics_the_curves_and_the_first_broken_place_are_still_told(net, path):
    with Monitor(net, every=1, metrics=(), jsonl=path) as monitor:
        train(net, monitor, 2)
        assert set(monitor.latest) == {"train/loss", "train/grad_norm"}
        with torch.no_grad():
            next(net.layers[1].parameters())[0, 0] = torch.nan
        train(net, monitor, 1)
    assert any("layers.1" in alert.text for alert in monitor.alerts)


def test_the_numbers_are_those_of_the_attention(path):
    fresh = Net()
    with Monitor(fresh, every=1, num_queries=None, jsonl=path, auto_step=False) as monitor:
        fresh(states())
        monitor.end_step()
    layer = fresh.layers[0]
    with torch.no_grad():
        q, k = (
            part(states()).view(2, 7, 3, 11).transpose(1, 2)
            for part in (layer.q_proj, layer.k_proj)
        )
        scores = q @ k.mT * 11**-0.5
        weights = scores.softmax(-1)
        entropy = -(weights * weights.log()).sum(-1).mean((0, 2))
    for head in range(3):
        now = monitor.latest
        assert now[f"attn/layers.0/{head}/entropy_nats"] == pytest.approx(float(entropy[head]))
        largest = float(scores[:, head].max())
        assert now[f"attn/layers.0/{head}/score_max"] == pytest.approx(largest)
    assert now["attn/layers.0/mean/entropy_nats"] == pytest.approx(float(entropy.mean()))
    assert now["attn/layers.0/max/entropy_nats"] == pytest.approx(float(entropy.max()))
    quantile = float(entropy.double().quantile(0.99))
    assert now["attn/layers.0/q99/entropy_nats"] == pytest.approx(quantile)


@torch.no_grad()
def test_case_a19_maximum_over_micro_batches_then_reset(path):
    model = nn.Sequential(nn.Identity(), Attention(4, 1))
    for part in (model[1].q_proj, model[1].k_proj):
        nn.init.eye_(part.weight)
    direction = torch.tensor([1.0, 0, 0, 0])

    def batch_with(score):  # q.k / sqrt(4) = score for one pair of tokens
        tokens_in = torch.zeros(1, 5, 4)
        tokens_in[0, 2] = direction * math.sqrt(2 * score)
        return tokens_in

    with Monitor(model, every=1, jsonl=path, auto_step=False) as monitor:
        for micro_batches in ((3.0, 80.0, 1.0), (5.0, 2.0)):
            for score in micro_batches:
                model(batch_with(score))
            monitor.end_step()
            largest = monitor.latest["attn/1/max/score_max"]
            assert largest == pytest.approx(max(micro_batches), rel=1e-5)


@pytest.mark.parametrize("spans_backward", [False, True])
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_case_a10_checkpointing_counts_once_and_changes_no_gradient(
    spans_backward, reentrant, path
):
    gradients, ids = {}, tokens()["input_ids"]
    for is_watched in (False, True):
        model = HOSTS["gpt2"].build(attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0).train()
        model.activation_checkpointing_enable({"use_reentrant": reentrant})
        monitor = Monitor(model, every=1, jsonl=path, auto_step=False)
        if is_watched:
            monitor.__enter__()
        loss = model(ids, labels=ids, use_cache=False).loss
        if is_watched and not spans_backward:
            monitor.end_step()
            monitor.__exit__(None, None, None)
        loss.backward()
        if is_watched and spans_backward:
            counted = float(monitor.sums.counts["transformer.h.0.attn"].amax())
            assert counted == ids.numel()
            monitor.end_step()
            monitor.__exit__(None, None, None)
        gradients[is_watched] = [parameter.grad for parameter in model.parameters()]
    for stock, watched in zip(gradients[False], gradients[True], strict=True):
        assert torch.equal(stock, watched)


def test_case_a11_memory_is_flat_and_everything_is_put_back(net, path):
    import gc

    counts = {}
    gc.collect()
    gc.freeze()  # what other tests left is not counted, and may go meanwhile
    with torch.no_grad(), Monitor(net, every=1, jsonl=path, auto_step=False) as monitor:
        for step in range(30):
            net(states())
            monitor.end_step()
            if step in (3, 29):
                gc.collect()
                counts[step] = sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects())
    gc.unfreeze()
    assert counts[3] == counts[29]
    with pytest.raises(RuntimeError, match="from the body"), Monitor(net, jsonl=path):
        raise RuntimeError("from the body")
    with pytest.raises(ValueError, match="hidden_states must be"), Monitor(net, jsonl=path):
        net(torch.randn(2, 3))
    assert_put_back(net)


class ConvBetween(nn.Module):
    """Alternates attention and a convolution, queries near a vector and keys near its negative."""

    def __init__(self):
        super().__init__()
        self.attn, self.conv = Attention(8, 2), nn.Conv1d(8, 8, 3, padding=1)
        self.attn.q_proj.bias = nn.Parameter(torch.full((8,), 3.0))
        self.attn.k_proj.bias = nn.Parameter(torch.full((8,), -3.0))

    def forward(self, hidden_states):
        return self.conv(self.attn(hidden_states).mT)


@torch.no_grad()
def test_case_a20_layers_without_attention_and_negative_maxima(path):
    model = ConvBetween()
    with Monitor(model, every=1, jsonl=path, auto_step=False) as monitor:
        model(0.1 * torch.randn(2, 5, 8))
        monitor.end_step()
    assert [site.name for site in monitor.sums.sites] == ["attn"]
    for head in ("0", "1"):
        assert monitor.latest[f"attn/attn/{head}/score_max"] < 0
        assert math.isfinite(monitor.latest[f"attn/attn/{head}/score_max"])
    assert monitor.alerts == []


def test_the_first_layer_and_head_to_break_are_named_with_the_last_healthy_numbers(net, path):
    told = []
    with Monitor(net, every=4, jsonl=path, on_alert=told.append) as monitor:
        train(net, monitor, 6)
        with torch.no_grad():
            net.layers[1].v_proj.weight.view(3, 11, 33)[2, 0, 0] = math.nan
        train(net, monitor, 2)
    kinds = [alert.kind for alert in told]
    assert kinds == ["nonfinite_loss", "nonfinite_grad_norm", "nonfinite_attention"] or kinds == [
        "nonfinite_loss", "nonfinite_attention",
    ]  # fmt: skip
    broken = told[-1]
    # at step 7 all weights are NaN: the first layer breaks first
    assert (broken.step, broken.layer, broken.head, broken.healthy_step) == (7, "layers.0", 0, 4)
    assert "last healthy step 4: entropy_nats" in broken.text
    logged = next(e for e in events(path, "alert") if e["kind"] == "nonfinite_attention")
    assert set(logged["healthy"]) == {"layers.0", "layers.1"}


@torch.no_grad()
def test_a_head_that_breaks_in_a_measured_step_is_named_at_once(net, path):
    net.layers[1].k_proj.weight.view(3, 11, 33)[2, 0, 0] = math.nan
    with Monitor(net, every=1, jsonl=path, auto_step=False) as monitor:
        net(states())
        monitor.end_step()
    alert = next(a for a in monitor.alerts if a.kind == "nonfinite_attention")
    assert (alert.layer, alert.head, alert.healthy_step) == ("layers.1", 2, None)


@torch.no_grad()
def test_growing_scores_are_told_once_and_again_after_recovery(net, path):
    with Monitor(net, every=1, jsonl=path, auto_step=False) as monitor:
        for factor in (1, 1000, 1, 1 / 1000, 1000):
            net.layers[0].q_proj.weight.view(3, 11, 33)[1] *= factor
            net(states())
            monitor.end_step()
    exploding = [alert for alert in monitor.alerts if alert.kind == "exploding_scores"]
    assert [(a.step, a.layer, a.head) for a in exploding] == [
        (1, "layers.0", 1), (4, "layers.0", 1),
    ]  # fmt: skip


@torch.no_grad()
def test_case_a17_overflow_is_told_while_all_is_finite(path):
    model = nn.Sequential(nn.Identity(), Attention(33, 3)).to(torch.float16)
    model[1].inner.scale = 1e-6
    model[1].q_proj.weight.view(3, 11, 33)[1] *= 400
    model[1].k_proj.weight.view(3, 11, 33)[1] *= 400
    with Monitor(model, every=1, jsonl=path, auto_step=False) as monitor:
        model(states().half())
        monitor.end_step()
    alert = next(a for a in monitor.alerts if a.kind == "overflow")
    assert (alert.layer, alert.head) == ("1", 1)
    assert "logit overflow" in alert.text


def test_spikes_stand_out_of_what_was_usual():
    calm = [1.0 + 0.01 * (i % 5) for i in range(SPIKE_ENOUGH)]
    assert is_spike(2.0, calm)
    assert not is_spike(1.03, calm)
    assert not is_spike(2.0, [1.0] * SPIKE_ENOUGH)
    watch = Watch()
    for step, value in enumerate([*calm, 9.0, 1.0]):
        alerts = list(watch.of_curves(step, {"grad_norm": value}))
        assert bool(alerts) == (step == SPIKE_ENOUGH)
    assert list(watch.of_curves(99, {"loss": math.inf}))[0].kind == "nonfinite_loss"
    assert list(watch.of_curves(100, {"loss": math.inf})) == []


def test_a_loss_far_above_its_start_is_looked_at_closely_and_told_once():
    watch, told, alarmed = Watch(), [], []
    for step, value in enumerate([2.0, 3.0, 21.0, 40.0, 1.0, 25.0]):
        told += [(a.step, a.kind) for a in watch.of_curves(step, {"loss": value})]
        alarmed.append(watch.is_alarmed)
    assert told == [(2, "above_start"), (5, "above_start")]
    assert alarmed == [False, False, True, True, False, True]
    negative = Watch()
    assert not [a for v in (-1.0, 5.0) for a in negative.of_curves(0, {"loss": v})]


def test_the_step_after_an_alert_is_measured(net, path):
    scale = [1.0, 1.0, 30.0, 30.0, 1.0, 1.0]
    with Monitor(net, every=100, jsonl=path, auto_step=False) as monitor:
        for factor in scale:
            loss = net(states())
            monitor.note(loss=loss.item() * factor)
            monitor.end_step()
    assert monitor.measured_steps == [0, 3, 4]


def test_monitor_and_report_mark_the_same_spikes():
    """A falling, noisy loss with three outliers and a NaN: one rule, whoever reads it."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(300, generator=generator, dtype=torch.float64)
    curve = (5 * torch.exp(-torch.arange(300) / 80) + 0.05 * noise).tolist()
    for step in (120, 150, 299):
        curve[step] += 3
    curve[200] = math.nan
    watch, told = Watch(), []
    for step, value in enumerate(curve):
        told += [a.step for a in watch.of_curves(step, {"loss": value}) if a.kind == "spike"]
    assert tuple(told) == running_spikes(curve) == (120, 150, 299)


def test_a_lost_loss_is_told_once():
    watch = Watch()
    values = [5.0 - 0.1 * i for i in range(40)] + [4.9] * 60
    told = []
    for step, value in enumerate(values):
        list(watch.of_curves(step, {"loss": value}))
        told += watch.of_divergence(step)
    assert [alert.kind for alert in told] == ["divergence"]
    assert 30 <= int(told[0].text.split()[-1]) <= 56


def test_state_goes_on_with_the_run(net, path):
    with Monitor(net, every=4, jsonl=path) as monitor:
        train(net, monitor, 6)
    state = json.loads(json.dumps(monitor.state_dict()))
    again = Monitor(Net(), every=4, jsonl=path)
    again.load_state_dict(state)
    assert again.step == 6
    assert list(again.watch.curves["loss"]) == list(monitor.watch.curves["loss"])
    with again:
        train(again.model, again, 4)
    assert again.measured_steps == [8]
    assert [event["step"] for event in events(path, "scalars")] == [0, 4, 8]
    with pytest.raises(ValueError, match="state must be that of a Monitor"):
        again.load_state_dict({})


def test_evaluation_in_between_is_not_counted(net, path):
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    with Monitor(net, every=1, num_queries=None, jsonl=path) as monitor:
        for _ in range(2):
            net(states()).backward()
            with torch.no_grad():
                net(100 * states(5, batch=9))
            assert float(monitor.sums.counts["layers.0"].amax()) == 2 * 7
            optimizer.step()
        optimizer.step()  # without a forward it ends nothing
    assert monitor.measured_steps == [0, 1]


def test_a_second_optimizer_does_not_end_the_step(net, path):
    halves = [torch.optim.SGD(layer.parameters(), lr=1e-3) for layer in net.layers]
    stranger = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=1e-3)
    with Monitor(net, every=1, jsonl=path) as monitor:
        for _ in range(3):
            net(states()).backward()
            for optimizer in (stranger, *halves):
                optimizer.step()
    assert monitor.step == 3


@pytest.mark.compile
@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("how", ["wrapped", "in_place"])
def test_compiled_models_run_a_probe_and_say_so(order, how, path):
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("eager")
    model, plain = HOSTS["timm_vit"].build(), HOSTS["timm_vit"].build()
    images = HOSTS["timm_vit"].batch()

    def compiled():
        if how == "wrapped":
            return torch.compile(model, backend=counter)
        model.compile(backend=counter)
        return model

    ready = compiled() if order == "after" else None
    if ready is not None:
        ready(images)
    watched = model if order == "before" else ready
    with Monitor(watched, every=2, jsonl=path, auto_step=False) as monitor:
        ready = compiled() if ready is None else ready
        for _ in range(5):
            output = ready(images)
            monitor.end_step()
    torch.testing.assert_close(output, plain(images), atol=1e-5, rtol=0)
    assert monitor.measured_steps == [0, 2, 4]
    assert {event["mode"] for event in events(path, "scalars")} == {"probe"}
    assert counter.frame_count <= 2
    with Monitor(plain, every=1, jsonl=path, auto_step=False) as reference:
        plain(images)
        reference.end_step()
    assert monitor.latest == pytest.approx(reference.latest, abs=1e-5)


@pytest.mark.parametrize("name", ["gpt2", "llama", "timm_vit", "swin", "torch_encoder", "whisper"])
def test_every_library_is_seen(name, path):
    model = HOSTS[name].build()
    with torch.no_grad(), Monitor(model, every=1, jsonl=path, auto_step=False) as monitor:
        run(model, HOSTS[name].batch())
        monitor.end_step()
    layers = {key.split("/")[1] for key in monitor.latest if key.startswith("attn/")}
    assert len(layers) == HOSTS[name].num_sites
    assert all(math.isfinite(value) for value in monitor.latest.values())
    assert_put_back(model)


@pytest.mark.parametrize("is_on", [True, False])
def test_case_a09_the_encoder_fast_path_is_off_in_a_measured_step_only(is_on, path):
    layer = nn.TransformerEncoderLayer(32, 4, batch_first=True)
    model, states_in = nn.TransformerEncoder(layer, 2).eval(), torch.randn(2, 7, 32)
    enabled = torch.backends.mha.get_fastpath_enabled
    torch.backends.mha.set_fastpath_enabled(is_on)
    try:
        with (
            torch.inference_mode(),
            Monitor(model, every=2, jsonl=path, auto_step=False) as monitor,
        ):
            expected = model(states_in)
            assert enabled() == is_on
            monitor.end_step()
            between = model(states_in)
            assert monitor.sums.num_calls == 0
            monitor.end_step()
        assert enabled() == is_on
    finally:
        torch.backends.mha.set_fastpath_enabled(True)
    assert monitor.measured_steps == [0]
    layers = {name.split("/")[1] for name in monitor.latest if name.startswith("attn/")}
    assert layers == {"layers.0.self_attn", "layers.1.self_attn"}
    torch.testing.assert_close(between, expected, atol=1e-6, rtol=0)


def test_steps_between_cost_no_hook_on_any_layer(net, path):
    with Monitor(net, every=5, jsonl=path, auto_step=False) as monitor:
        for step in range(5):
            seen = []
            handle = net.layers[0].o_proj.register_forward_hook(
                lambda m, a, o, seen=seen: seen.append(len(net.layers[0]._forward_pre_hooks))
            )
            net(states())
            handle.remove()
            assert seen == [1 if step == 0 else 0]
            monitor.end_step()


def test_tensorboard_and_accelerate_get_the_scalars(net, path, tmp_path):
    from accelerate import Accelerator
    from torch.utils.tensorboard import SummaryWriter

    board = SummaryWriter(tmp_path / "board")
    accelerator = Accelerator(cpu=True, log_with="tensorboard", project_dir=tmp_path / "acc")
    accelerator.init_trackers("run")
    for writer in (board, accelerator):
        with Monitor(net, every=1, writer=writer, jsonl=path) as monitor:
            model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), 1e-3))
            loss = model(states())
            accelerator.backward(loss)
            monitor.note(loss=loss)
            optimizer.step()
        assert monitor.measured_steps == [0]
    board.close()
    accelerator.end_training()
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for folder in (tmp_path / "board", tmp_path / "acc" / "run"):
        read = EventAccumulator(str(folder))
        read.Reload()
        assert "attn/layers.0/mean/entropy_nats" in read.Tags()["scalars"]


def test_a_tracker_is_anything_that_logs():
    logged = []

    class Run:
        def log(self, values, step):
            logged.append((step, values))

    as_writer(Run())(3, {"a": 1.0})
    assert logged == [(3, {"a": 1.0})]
    with pytest.raises(ValueError, match="writer must be a function of step and scalars"):
        as_writer(5)


@pytest.mark.filterwarnings("ignore")
def test_a_trainer_of_transformers(path, tmp_path):
    from transformers import Trainer, TrainingArguments

    from levelhead.monitor_trainer import trainer_callback

    model = HOSTS["gpt2"].build()
    ids = tokens()["input_ids"]
    data = [{"input_ids": row, "labels": row} for row in ids]
    arguments = TrainingArguments(
        str(tmp_path), max_steps=4, per_device_train_batch_size=2, report_to=[], use_cpu=True,
        save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    monitor = Monitor(model, every=2, jsonl=path)
    Trainer(model, arguments, train_dataset=data, callbacks=[trainer_callback(monitor)]).train()
    assert monitor.measured_steps == [0, 2]
    assert monitor.step == 4
    assert "train/loss" in monitor.latest
    assert "train/grad_norm" in monitor.latest
    assert_put_back(model)


def _split(how):
    torch.manual_seed(0)
    if how == "ddp":
        return nn.parallel.DistributedDataParallel(Net())
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    warnings.simplefilter("ignore")  # an attention returns a view, which nobody changes in place
    net, mesh = Net(), init_device_mesh("cpu", (2,))
    for layer in net.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(net, mesh=mesh)


def _rank(rank, how, folder):
    model = _split(how)
    calls, all_reduce = [], dist.all_reduce

    def counted(tensor, op=dist.ReduceOp.SUM, **more):
        calls.append(str(op).split(".")[-1])
        return all_reduce(tensor, op, **more)

    dist.all_reduce = counted
    path = f"{folder}/{rank}.jsonl"
    latest = []
    with Monitor(
        model, every=2, jsonl=path, num_queries=None, writer=lambda step, values: None
    ) as monitor:
        train(model, monitor, 3, feed=lambda seed: states(2 * seed + rank, batch=1))
        latest.append(dict(monitor.latest))
        # One rank alone sees its loss break; both must measure the same steps or hang.
        for step in range(3):
            broken = 100.0 if rank == 1 and step == 1 else 1.0
            model(states(rank, batch=1))
            monitor.note(loss=broken, grad_norm=1.0)
            monitor.end_step()
    found = [calls, latest[0], os.path.exists(path), monitor.measured_steps]
    torch.save(found, f"{folder}/{rank}.pt")


@pytest.mark.parametrize("how", ["ddp", "fsdp2"])
def test_two_processes_reduce_twice_a_measured_step_and_agree(how, tmp_path, free_port):
    on_ranks(2, free_port, _rank, how, str(tmp_path))
    found = {rank: torch.load(tmp_path / f"{rank}.pt") for rank in range(2)}
    measured = found[0][3]
    assert found[1][3] == measured == [0, 2, 4, 5]  # after 4, where rank 1 was alarmed, comes 5
    for calls, *_ in found.values():
        assert calls == ["MAX", "SUM"] * len(measured)
    assert found[0][1] == found[1][1]
    assert [found[rank][2] for rank in (0, 1)] == [True, False]
    torch.manual_seed(0)
    single = Net()
    with Monitor(single, every=2, jsonl=tmp_path / "one.jsonl", num_queries=None) as monitor:
        both = lambda seed: torch.cat([states(2 * seed, 1), states(2 * seed + 1, 1)])  # noqa: E731
        train(single, monitor, 3, feed=both)
    assert found[0][1].keys() == monitor.latest.keys()
    assert {"train/loss", "train/grad_norm"} <= monitor.latest.keys()
    for name, value in found[0][1].items():
        assert value == pytest.approx(monitor.latest[name], abs=1e-5, rel=1e-4), name


def test_a_loss_that_was_noted_counts_instead_of_the_one_that_was_seen(path):
    model = HOSTS["gpt2"].build().train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen, noted = [], []
    with Monitor(model, every=1, jsonl=path) as monitor:
        for is_noted in (False, True, True, False):
            for _ in range(2):
                ids = tokens()["input_ids"]
                loss = model(input_ids=ids, labels=ids).loss
                if is_noted:
                    loss = (loss + 10) / 2
                    monitor.note(loss=loss)
                loss.backward()
                noted.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
            seen.append(monitor.latest["train/loss"])
    expected = [sum(pair) / 2 for pair in zip(noted[::2], noted[1::2], strict=True)]
    assert seen == pytest.approx(expected, rel=1e-6)


def test_an_optimizer_in_the_backward_pass_is_refused_with_the_way_out(net, path):
    optimizers = {p: torch.optim.SGD([p], lr=1e-3) for p in net.parameters()}
    for parameter, optimizer in optimizers.items():
        parameter.register_post_accumulate_grad_hook(lambda _, own=optimizer: own.step())
    rule = "optimiser that steps after the backward pass, got SGD, which steps within it"
    with Monitor(net, jsonl=path), pytest.raises(ValueError, match=rule):
        net(states()).backward()
    with Monitor(net, every=1, jsonl=path, auto_step=False) as monitor:
        net.zero_grad()
        net(states()).backward()
        monitor.end_step()
    whole = torch.cat([p.grad.flatten() for p in net.parameters()]).norm()
    assert monitor.latest["train/grad_norm"] == pytest.approx(whole.item(), rel=1e-5)


def test_a_frozen_model_counts_the_steps_of_what_is_trained_on_top(net, path):
    head = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(head.parameters(), lr=1e-3)
    net.requires_grad_(False)
    with Monitor(net, every=1, jsonl=path) as monitor:
        for step in range(3):
            head(net(states(step))[None]).sum().backward()
            optimizer.step()
    assert monitor.measured_steps == [0, 1, 2]


@pytest.mark.parametrize(("options", "words"), [
    ({"every": 0}, "every must be at least 1"),
    ({"every": 2.5}, "every must be a whole number, got every=2.5"),
    ({"metrics": ("entropy",)}, "unknown metric 'entropy'; known: entropy_nats"),
    ({"writer": 3}, "writer must be a function"),
])  # fmt: skip
def test_bad_options_are_refused(net, path, options, words):
    with pytest.raises(ValueError, match=words):
        Monitor(net, jsonl=path, **options)


def test_models_that_cannot_be_watched_are_refused(path):
    with pytest.raises(ValueError, match="no attention found"):
        Monitor(nn.Linear(2, 2), jsonl=path)
    with pytest.raises(ValueError, match="the attention must be a part of the model"):
        Monitor(Attention(6, 2), jsonl=path)


def test_a_measured_step_without_attention_is_told(net, path):
    with Monitor(net, every=1, jsonl=path, auto_step=False) as monitor:
        monitor.end_step()
    assert [alert.kind for alert in monitor.alerts] == ["not_seen"]


def test_small_parts():
    linear = nn.Linear(2, 2)
    assert gradient_squares(linear, 1) is None
    linear(torch.ones(3, 2)).square().sum().backward()
    square = sum(float(p.grad.square().sum()) for p in linear.parameters() if p.grad is not None)
    assert gradient_squares(linear, 1) == (pytest.approx(square), 0.0)
    named = scalars({"": {"p_max": [0.25, math.nan]}})
    assert named["attn/root/mean/p_max"] == 0.25
    assert named["attn/root/max/p_max"] == 0.25
