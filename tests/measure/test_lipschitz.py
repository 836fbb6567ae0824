"""bound >= local bound >= truth >= found: by hand, by exact sums, by random nets, by ascent."""

import pytest
import torch

from levelhead.measure.lipschitz import (
    block_rms_norm,
    lipschitz_bound,
    local_lipschitz_bound,
)
from levelhead.measure.lipschitz_interval import lipschitz_found, lipschitz_interval

ROUNDING = 1 + 1e-9


def random_net(seed, largest=7):
    """Hidden states, the four weights and the options of a small net of random shape and scale."""
    generator = torch.Generator().manual_seed(seed)
    tokens, embed_dim, head_dim, heads, groups = (
        int(torch.randint(1, top, (), generator=generator)) for top in (largest, 6, 4, 3, 3)
    )
    gain, spread = (torch.rand(2, generator=generator) * 2 + 0.05).tolist()
    kv_width, width = heads * head_dim, heads * groups * head_dim
    shapes = [(embed_dim, width), *[(embed_dim, kv_width)] * 2, (width, embed_dim)]

    def normal(shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    states = spread * normal((tokens, embed_dim))
    options = {"num_heads": heads * groups, "num_kv_heads": heads, "scale": head_dim**-0.5}
    return states, [gain * normal(shape) for shape in shapes], options


def test_block_rms_norm_is_the_largest_root_mean_square_of_a_token():
    states = torch.randn(2, 7, 5)
    expected = states.square().mean(-1).sqrt().max(-1).values
    assert torch.allclose(block_rms_norm(states), expected)
    weights = torch.rand(2, 7, 7).softmax(-1)
    assert (block_rms_norm(weights @ states) <= block_rms_norm(states)).all()
    with pytest.raises(ValueError, match=r"hidden_states must be \[..., T, E\]"):
        block_rms_norm(torch.ones(3))


def test_two_tokens_by_hand():
    """T = 2, E = D = 1, x = (1, -1): theta = 4 p (1 - p), true 1.60, with half of Phi 1.42."""
    states, one = torch.tensor([[1.0], [-1.0]]), torch.ones(1, 1)
    p = torch.sigmoid(torch.tensor(2.0))
    theta = float(4 * p * (1 - p))
    weights = (one, one, one, one)
    options = {"num_heads": 1, "radius": 1.0, "temperature": 1.0}
    bound = lipschitz_bound(*weights, theta=theta, **options)
    found = lipschitz_interval(states, *weights, num_heads=1, scale=1.0).found
    assert bound == pytest.approx(1 + 2 * theta)
    assert found == pytest.approx(1.6015, abs=1e-4)
    assert 1 + theta < found < bound


def exact_norm(states, weights, scale):
    """The norm itself where E = D = 1: the largest row sum of |J|."""

    def attention(states):
        query, key, value = (states @ weight for weight in weights[:3])
        return (scale * query @ key.mT).softmax(-1) @ value @ weights[3]

    jacobian = torch.autograd.functional.jacobian(attention, states)[:, 0, :, 0]
    return float(jacobian.abs().sum(1).max())


def test_one_channel_encloses_the_exact_norm_and_finds_it():
    for seed in range(11):
        generator = torch.Generator().manual_seed(seed)
        states = torch.randn(5, 1, generator=generator, dtype=torch.float64)
        weights = [torch.randn(1, 1, generator=generator, dtype=torch.float64) for _ in range(4)]
        found = lipschitz_interval(states, *weights, num_heads=1, scale=1.3)
        exact = exact_norm(states, weights, 1.3)
        assert found.found == pytest.approx(exact, rel=1e-9)
        assert exact <= found.local_bound * ROUNDING
        assert found.local_bound <= found.bound * ROUNDING


def enclose(seed):
    states, weights, options = random_net(seed)
    found = lipschitz_interval(states, *weights, is_causal=bool(seed % 2), **options)
    assert found.found <= found.local_bound * ROUNDING, seed
    assert found.local_bound <= found.bound * ROUNDING, seed
    return found.bound / found.local_bound


def test_random_nets_never_violate_the_bounds():
    sharper = torch.tensor([enclose(seed) for seed in range(30)])
    assert sharper.median() > 1.5


@pytest.mark.slow
def test_a_thousand_random_nets_never_violate_the_bounds():
    for seed in range(1000):
        enclose(seed)


def test_a_step_of_finite_size_never_moves_the_output_by_more():
    """The bound over a ball of inputs, against pairs of inputs inside it."""
    for seed in range(30):
        states, weights, options = random_net(seed)
        states = states / block_rms_norm(states)
        other = states + 0.5 * torch.randn_like(states)
        other = other / block_rms_norm(other).clamp_min(1.0)
        bound = lipschitz_bound(
            *weights,
            num_heads=options["num_heads"],
            num_kv_heads=options["num_kv_heads"],
            radius=1.0,
            temperature=1 / options["scale"],
        )
        moved = block_rms_norm(attend(states, weights, options) - attend(other, weights, options))
        assert moved <= bound * block_rms_norm(states - other) * ROUNDING


def attend(states, weights, options, q_bias=0.0, k_bias=0.0):
    """Multi-head attention, written out."""
    heads, kv_heads = options["num_heads"], options["num_kv_heads"]
    query, key, value = (states @ weight for weight in weights[:3])
    query, key = (query + q_bias).unflatten(1, (heads, -1)), key + k_bias
    key, value = (z.unflatten(1, (kv_heads, -1)) for z in (key, value))
    key, value = (z.repeat_interleave(heads // kv_heads, dim=1) for z in (key, value))
    scores = options["scale"] * torch.einsum("thd,shd->hts", query, key)
    return torch.einsum("hts,shd->thd", scores.softmax(-1), value).flatten(1) @ weights[3]


def test_biases_are_inside_the_bounds():
    for seed in range(20):
        states, weights, options = random_net(seed)
        q_bias, k_bias = (3 * torch.randn(w.shape[1], dtype=torch.float64) for w in weights[:2])
        heads = {name: options[name] for name in ("num_heads", "num_kv_heads")}
        found = lipschitz_found(lambda x: attend(x, weights, options, q_bias, k_bias), states)  # noqa: B023
        local = local_lipschitz_bound(states, *weights, q_bias=q_bias, k_bias=k_bias, **options)
        radius, temperature = float(block_rms_norm(states)), 1 / options["scale"]
        bound = lipschitz_bound(
            *weights, radius=radius, temperature=temperature, q_bias=q_bias, **heads
        )
        assert found <= local * ROUNDING
        assert local <= bound * ROUNDING
        together = lipschitz_interval(states, *weights, q_bias=q_bias, k_bias=k_bias, **options)
        expected = (bound, local, pytest.approx(found, rel=1e-9))
        assert (together.bound, together.local_bound, together.found) == expected


def ascend(seed, steps):
    """Climb the ratio of found to bound over states, weights and direction (two tokens)."""
    torch.manual_seed(seed)
    variables = [torch.randn(2, 3, dtype=torch.float64)]
    variables += [torch.randn(3, 3, dtype=torch.float64) for _ in range(4)]
    variables += [torch.randn(2, 3, dtype=torch.float64)]
    for variable in variables:
        variable.requires_grad_()
    optimizer = torch.optim.Adam(variables, lr=0.03)
    for _ in range(steps):
        optimizer.zero_grad()
        (-torch.log(ratio_of_two_tokens(*variables))).backward()
        optimizer.step()
    ratio = ratio_of_two_tokens(*variables).detach()
    return [variable.detach() for variable in variables[:5]], float(ratio)


def ratio_of_two_tokens(states, query, key, value, output, direction):
    """Reached ratio over the bound with its own theta, in closed form for two tokens."""
    direction = torch.nn.functional.normalize(direction, dim=1)

    def attention(x):
        return ((x @ query) @ (x @ key).mT).softmax(-1) @ x @ value @ output

    moved = torch.autograd.functional.jvp(attention, states, direction, create_graph=True)[1]
    p = ((states @ query) @ (states @ key).mT).softmax(-1)
    theta = (4 * p[:, 0] * p[:, 1]).max()
    norms = [torch.linalg.matrix_norm(w, 2) for w in (query, key, value, output)]
    radius = states.norm(dim=1).max()
    phi = 2 * radius**2 * norms[0] * norms[1] * norms[2]
    return moved.norm(dim=1).max() / (norms[3] * (norms[2] + theta * phi))


def check_ascent(seeds, steps):
    reached = []
    for seed in seeds:
        (states, *weights), ratio = ascend(seed, steps)
        attn_weights = ((states @ weights[0]) @ (states @ weights[1]).mT).softmax(-1)
        theta = min(1.0, float((4 * attn_weights[:, 0] * attn_weights[:, 1]).max()))
        radius = float(block_rms_norm(states))
        options = {"num_heads": 1, "radius": radius, "temperature": 1.0}
        bound = lipschitz_bound(*weights, theta=theta, **options)
        local = local_lipschitz_bound(states, *weights, num_heads=1, scale=1.0)
        found = lipschitz_interval(states, *weights, num_heads=1, scale=1.0).found
        assert ratio <= ROUNDING
        assert found <= local * ROUNDING
        assert found <= bound * ROUNDING
        reached.append(found / bound)
    return max(reached)


def test_gradient_ascent_does_not_pass_the_bound_but_comes_near():
    assert check_ascent(range(2), steps=300) > 0.8


@pytest.mark.slow
def test_long_gradient_ascent_nearly_attains_the_bound():
    assert check_ascent(range(5), steps=1000) > 0.98


def test_half_of_phi_would_be_violated():
    """The assertion of the ascent can fail: with Phi halved it does."""
    states, one = torch.tensor([[1.0], [-1.0]]), torch.ones(1, 1)
    theta = 4 * torch.sigmoid(torch.tensor(2.0)) * torch.sigmoid(torch.tensor(-2.0))
    bound = lipschitz_bound(
        one, one, one, one, num_heads=1, radius=1.0, temperature=2.0, theta=float(theta)
    )
    found = lipschitz_interval(states, one, one, one, one, num_heads=1, scale=1.0).found
    assert bound < found


def test_theta_of_each_head_enters():
    states, weights, options = random_net(3)
    heads = options["num_heads"]
    shared = {"num_heads": heads, "num_kv_heads": options["num_kv_heads"]}
    shared |= {"radius": 1.0, "temperature": 2.0}
    theta = torch.linspace(0, 1, heads)
    bounds = [lipschitz_bound(*weights, theta=t, **shared) for t in (0.0, theta, 1.0)]
    assert bounds[0] < bounds[1] <= bounds[2]
    assert bounds[0] == lipschitz_bound(*weights, **shared | {"radius": 0.0})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"radius": -1.0}, "radius must not be negative, got radius=-1.0"),
        ({"temperature": 0.0}, "temperature must be positive"),
        ({"theta": 1.5}, r"theta must lie in \[0, 1\], got theta=1.5"),
        ({"theta": torch.ones(3)}, "theta must be a number or one a head"),
        ({"num_heads": 4}, "num_heads=4"),
        ({"q_weight": torch.full((5, 6), torch.nan)}, "weights must be finite"),
        ({"o_weight": torch.ones(5, 5)}, "weights must fit together"),
    ],
)
def test_bad_input_is_refused(change, message):
    arguments = {name: torch.ones(5, 6) for name in ("q_weight", "k_weight", "v_weight")}
    arguments |= {"o_weight": torch.ones(6, 5), "num_heads": 2, "radius": 1.0, "temperature": 1.0}
    with pytest.raises(ValueError, match=message):
        lipschitz_bound(**arguments | change)


def test_weights_of_two_widths_are_refused():
    one = torch.ones(5, 6)
    with pytest.raises(ValueError, match="for self-attention: weights must share E"):
        lipschitz_bound(
            torch.ones(4, 6), one, one, torch.ones(6, 4), num_heads=2, radius=1.0, temperature=1.0
        )
    with pytest.raises(ValueError, match="steps must be at least 1, got steps=0"):
        lipschitz_found(lambda x: x, torch.ones(3, 5), steps=0)
