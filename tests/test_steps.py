"""State that moves once per step: running means and singular vectors."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import levelhead as lh
from levelhead.steps import one_step
from ranks import on_ranks

RHO = 0.9
E, H, T = 12, 3, 5


class Block(nn.Module):
    """A residual attention that may recompute itself in the backward pass."""

    def __init__(self, variant, use_reentrant=None):
        super().__init__()
        self.attention = lh.Attention(E, H, variant=variant)
        self.use_reentrant = use_reentrant

    def forward(self, hidden_states):
        if self.use_reentrant is None:
            return hidden_states + self._attend(hidden_states)
        return hidden_states + checkpoint(
            self._attend, hidden_states, use_reentrant=self.use_reentrant
        )

    def _attend(self, hidden_states):
        return self.attention(hidden_states, is_causal=True)


def stack(variant, use_reentrant=None, num_layers=2):
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(variant, use_reentrant) for _ in range(num_layers)))
    return lh.track_steps(model)


def train(model, num_steps=3, seed=1):
    """Take steps of SGD and return what came out of each, with the gradients."""
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []
    for _ in range(num_steps):
        hidden_states = torch.randn(2, T, E, generator=generator)
        hidden_states = hidden_states.to(next(model.parameters()).dtype).requires_grad_()
        output = model(hidden_states)
        optimizer.zero_grad()
        output.square().mean().backward()
        seen.append(output.detach())
        seen.extend(parameter.grad.clone() for parameter in model.parameters())
        optimizer.step()
    return seen


def affine(model, layer_idx=0):
    return model[layer_idx].attention.inner.weights


def alphas(part, hidden_states):
    return part.phi(part.alpha_proj(hidden_states))


def test_running_mean_follows_the_recursion():
    model = stack("affine", num_layers=1)
    expected = torch.zeros(H)
    for _ in range(4):
        hidden_states = torch.randn(2, T, E)
        model(hidden_states)
        expected = RHO * expected + (1 - RHO) * alphas(affine(model), hidden_states).mean((0, 1))
        torch.testing.assert_close(affine(model).alpha_mean, expected.detach())
    assert affine(model).num_steps.item() == 4


def test_running_mean_reaches_the_values_the_paper_implies():
    """With alpha .5 throughout: .05, .33 and .45 after 1, 10 and 22 steps."""
    model = stack("affine", num_layers=1)
    nn.init.zeros_(affine(model).alpha_proj.weight)
    seen = {}
    for step in range(1, 23):
        model(torch.randn(1, 2, E))
        seen[step] = affine(model).alpha_mean[0].item()
    assert seen[1] == pytest.approx(0.05, abs=1e-6)
    assert seen[10] == pytest.approx(0.33, abs=0.005)
    assert seen[22] == pytest.approx(0.45, abs=0.005)


def test_the_mean_is_used_in_the_forward_that_moved_it():
    model = stack("affine", num_layers=1)
    hidden_states = torch.randn(2, T, E)
    output = model(hidden_states)
    evaluated = model.eval()(hidden_states)
    torch.testing.assert_close(output, evaluated)


def test_evaluation_does_not_move_the_mean_and_the_mean_has_no_gradient():
    model = stack("affine", num_layers=1)
    model(torch.randn(2, T, E))
    before = {k: v.clone() for k, v in model.state_dict().items()}
    model.eval()
    model(torch.randn(2, T, E))
    model(torch.randn(2, T, E))
    torch.testing.assert_close(model.state_dict(), before)
    assert not affine(model).alpha_mean.requires_grad


def test_warm_start_takes_the_first_mean_and_per_layer_shares_one():
    model = stack("affine(warm_start=True, moving_average='per_layer')", num_layers=1)
    hidden_states = torch.randn(2, T, E)
    model(hidden_states)
    first = alphas(affine(model), hidden_states).mean()
    torch.testing.assert_close(affine(model).alpha_mean, first.detach()[None])
    model(hidden_states + 1)
    second = alphas(affine(model), hidden_states + 1).mean()
    torch.testing.assert_close(
        affine(model).alpha_mean, (RHO * first + (1 - RHO) * second).detach()[None]
    )


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("form", ["padding", "dense", "bias", "token_mask"])
def test_padding_is_left_out_of_the_mean(side, form):
    layer = lh.track_steps(lh.Attention(E, H, variant="affine"))
    real = torch.ones(2, T, dtype=torch.bool)
    real[0, 3:] = False
    real = real.flip(1) if side == "left" else real
    hidden_states = torch.randn(2, T, E)
    dense = real[:, None, None, :] & lh.causal_mask(T, T)
    call = {
        "padding": {"attn_mask": real[:, None, None, :], "is_causal": True},
        "dense": {"attn_mask": dense},
        "bias": {"attn_bias": torch.zeros(2, 1, T, T).masked_fill(~dense, torch.finfo().min)},
        "token_mask": {"token_mask": real},
    }[form]
    layer(hidden_states, **call)
    part = layer.inner.weights
    expected = (1 - RHO) * alphas(part, hidden_states)[real].mean(0)
    torch.testing.assert_close(part.alpha_mean, expected.detach())


def test_cross_attention_counts_every_query():
    layer = lh.track_steps(lh.Attention(E, H, variant="affine"))
    hidden_states, context = torch.randn(2, T, E), torch.randn(2, T, E)
    mask = torch.ones(2, 1, 1, T, dtype=torch.bool)
    mask[0, ..., 2:] = False
    layer(hidden_states, context, attn_mask=mask)
    expected = (1 - RHO) * alphas(layer.inner.weights, hidden_states).mean((0, 1))
    torch.testing.assert_close(layer.inner.weights.alpha_mean, expected.detach())


def test_more_queries_than_keys_count_every_query_that_attends():
    inner = lh.track_steps(lh.InnerAttention("affine", embed_dim=E, num_heads=H))
    query, key = torch.randn(2, H, T, 4), torch.randn(2, H, 2, 4)
    hidden_states = torch.randn(2, T, E)
    mask = torch.ones(2, 1, 1, 2, dtype=torch.bool)
    mask[0] = False
    inner(query, key, key, hidden_states, attn_mask=mask)
    expected = (1 - RHO) * alphas(inner.weights, hidden_states)[1].mean(0)
    torch.testing.assert_close(inner.weights.alpha_mean, expected.detach())


def test_a_batch_of_padding_alone_leaves_the_mean_where_it_was():
    layer = lh.track_steps(lh.Attention(E, H, variant="affine"))
    layer(torch.randn(2, T, E))
    before = layer.inner.weights.alpha_mean.clone()
    layer(torch.randn(2, T, E), attn_mask=torch.zeros(2, 1, 1, T, dtype=torch.bool))
    torch.testing.assert_close(layer.inner.weights.alpha_mean, before)


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("variant", ["affine", "sigma_reparam", "affine + gate + quest"])
def test_checkpointing_changes_nothing(variant, use_reentrant):
    """Outputs, gradients and state over several steps; sums may come in another order."""
    plain, recomputing = stack(variant).double(), stack(variant, use_reentrant).double()
    for expected, found in zip(train(plain), train(recomputing), strict=True):
        torch.testing.assert_close(expected, found, rtol=1e-12, atol=1e-14)
    for expected, found in zip(
        plain.state_dict().values(), recomputing.state_dict().values(), strict=True
    ):
        torch.testing.assert_close(expected, found, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("variant", ["affine", "sigma_reparam"])
def test_a_tracked_model_may_be_checkpointed_as_a_whole(variant, use_reentrant):
    """A converted backbone is the outermost module tracked, and its caller checkpoints it."""
    plain, whole = stack(variant).double(), stack(variant).double()

    class Caller(nn.Module):
        def __init__(self):
            super().__init__()
            self.backbone = whole

        def forward(self, hidden_states):
            return checkpoint(self.backbone, hidden_states, use_reentrant=use_reentrant)

    for expected, found in zip(train(plain), train(Caller()), strict=True):
        torch.testing.assert_close(expected, found, rtol=1e-12, atol=1e-14)
    for expected, found in zip(
        plain.state_dict().values(), whole.state_dict().values(), strict=True
    ):
        torch.testing.assert_close(expected, found, rtol=1e-12, atol=1e-14)


@pytest.mark.compile
@pytest.mark.parametrize("use_reentrant", [None, False])
@pytest.mark.parametrize("variant", ["affine", "sigma_reparam"])
def test_compiling_with_and_without_checkpointing_changes_nothing(variant, use_reentrant):
    torch.compiler.reset()
    plain, recomputing = stack(variant), stack(variant, use_reentrant)
    compiled = torch.compile(recomputing, backend="aot_eager", fullgraph=True)
    for expected, found in zip(train(plain), train(compiled), strict=True):
        torch.testing.assert_close(expected, found)
    for expected, found in zip(
        plain.state_dict().values(), recomputing.state_dict().values(), strict=True
    ):
        torch.testing.assert_close(expected, found)


def test_a_naive_update_in_the_forward_would_be_caught():
    """The control: a buffer that is read and written by the forward moves twice."""

    class Naive(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))
            self.register_buffer("mean", torch.zeros(1))

        def forward(self, x):
            with torch.no_grad():
                self.mean.mul_(RHO).add_((1 - RHO) * x.mean())
            return self.weight * x * self.mean.clone()

    grads = []
    for recompute in (False, True):
        module, x = Naive(), torch.ones(3)
        output = checkpoint(module, x, use_reentrant=False) if recompute else module(x)
        output.sum().backward()
        grads.append(module.weight.grad.item())
    assert grads[0] != pytest.approx(grads[1])


@pytest.mark.parametrize("variant", ["affine", "sigma_reparam"])
def test_training_without_track_steps_is_refused_with_the_remedy(variant):
    layer = lh.Attention(E, H, variant=variant)
    with pytest.raises(
        ValueError, match=r"call levelhead\.track_steps\(model\) once on the outermost"
    ):
        layer(torch.randn(1, 2, E))
    layer.eval()(torch.randn(1, 2, E))


def test_tracking_again_further_out_moves_once():
    model = stack("affine", num_layers=1)
    outer = lh.track_steps(nn.Sequential(lh.track_steps(model)))
    assert len(model._forward_pre_hooks) == 0
    outer(torch.randn(2, T, E))
    outer(torch.randn(2, T, E))
    assert affine(model).num_steps.item() == 2


def test_a_copy_has_its_own_state():
    model = stack("affine", num_layers=1)
    twin = copy.deepcopy(model)
    model(torch.randn(2, T, E))
    model(torch.randn(2, T, E))
    assert affine(twin).alpha_mean.abs().max() == 0
    twin(torch.randn(2, T, E))
    assert affine(twin).num_steps.item() == 1
    assert affine(model).num_steps.item() == 2


def test_state_survives_a_round_trip_and_goes_on_the_same():
    model = stack("affine + gate")
    train(model, num_steps=2)
    twin = stack("affine + gate")
    twin.load_state_dict(model.state_dict())
    for expected, found in zip(train(model, seed=2), train(twin, seed=2), strict=True):
        assert torch.equal(expected, found)


def _train_on_rank(rank, world_size, wrap, folder):
    model = stack("affine")
    wrapped = nn.parallel.DistributedDataParallel(model) if wrap else model
    generator = torch.Generator().manual_seed(7)
    for _ in range(3):
        batch = torch.randn(2 * world_size, T, E, generator=generator)
        wrapped(batch[2 * rank : 2 * rank + 2]).square().mean().backward()
    torch.save([affine(model, i).alpha_mean for i in range(2)], f"{folder}/{rank}.pt")


@pytest.mark.parametrize("wrap", [True, False])
def test_running_means_are_those_of_the_whole_batch_on_every_rank(wrap, tmp_path, free_port):
    on_ranks(2, free_port, _train_on_rank, 2, wrap, str(tmp_path))
    ranks = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(*ranks, strict=True))
    # The first layer sees the same inputs as a single process, so its mean is that of all tokens.
    alone = stack("affine")
    generator = torch.Generator().manual_seed(7)
    for _ in range(3):
        alone(torch.randn(4, T, E, generator=generator))
    torch.testing.assert_close(ranks[0][0], affine(alone).alpha_mean)


def accumulated(model, batches):
    with one_step(model):
        for hidden_states in batches:
            model(hidden_states).square().mean().backward()
    return affine(model)


def test_micro_batches_of_one_step_move_the_mean_once_by_the_mean_of_all():
    """Layer 0 sees the same input either way, so its mean is that of the whole batch."""
    whole, parts, apart = (stack("affine").double() for _ in range(3))
    for step in range(3):
        torch.manual_seed(step)
        batch = torch.randn(6, T, E, dtype=torch.float64)
        whole(batch)
        part = accumulated(parts, batch.split(2))
        assert part.num_steps.item() == step + 1
        torch.testing.assert_close(part.alpha_mean, affine(whole).alpha_mean, atol=0, rtol=1e-14)
        for piece in batch.split(2):
            apart(piece)
    assert not torch.allclose(affine(apart).alpha_mean, affine(whole).alpha_mean, rtol=1e-2)
    assert parts.training
    parts(batch)
    assert affine(parts).num_steps.item() == 4  # the next plain forward is a step of its own


def test_one_step_changes_nothing_for_a_single_batch_a_frozen_model_or_another_variant():
    for variant in ("affine", "sigma_reparam", "softmax"):
        plain, within = stack(variant), stack(variant)
        hidden_states = torch.randn(2, T, E)
        plain(hidden_states).square().mean().backward()
        with one_step(within):
            within(hidden_states).square().mean().backward()
        for (name, one), two in zip(
            plain.state_dict().items(), within.state_dict().values(), strict=True
        ):
            assert torch.equal(one, two), name
    frozen = stack("affine").eval()
    before = affine(frozen).alpha_mean.clone()
    accumulated(frozen, [torch.randn(2, T, E)] * 2)
    assert torch.equal(affine(frozen).alpha_mean, before)


def test_a_step_that_breaks_off_leaves_the_model_usable():
    model = stack("affine")
    with pytest.raises(ValueError, match="hidden_states must be"), one_step(model):
        model(torch.randn(2, T, E + 1))
    model(torch.randn(2, T, E))
    assert affine(model).num_steps.item() == 1


@pytest.mark.compile
def test_one_step_holds_in_a_compiled_model():
    eager, compiled = stack("affine"), stack("affine")
    torch._dynamo.reset()
    fast = torch.compile(compiled, backend="aot_eager")
    for step in range(2):
        torch.manual_seed(step)
        batches = torch.randn(6, T, E).split(2)
        accumulated(eager, batches)
        with one_step(fast):
            for hidden_states in batches:
                fast(hidden_states).square().mean().backward()
    assert affine(compiled).num_steps.item() == 2
    torch.testing.assert_close(affine(compiled).alpha_mean, affine(eager).alpha_mean)
