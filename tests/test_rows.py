"""Unit rows: the fast gradient against autograd's own, near zero, in every mode of autograd."""

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import forward_ad, gradcheck, gradgradcheck

from levelhead.rows import inverse_row_norm, row_norms, unit_rows

EPS = 0.05


def rows_of(dtype=torch.float64):
    """Rows longer and shorter than EPS."""
    rows = torch.randn(2, 3, 5, 7, dtype=dtype)
    rows[0, 1] *= 1e-3
    return rows.requires_grad_()


def plain(rows, factor=None):
    inverse = inverse_row_norm(rows, EPS)
    return (rows * (inverse if factor is None else inverse * factor)).to(rows.dtype)


# torch scripts its own decompositions when forward-mode autograd is first used.
@pytest.mark.filterwarnings("ignore:.*torch.jit.script:FutureWarning")
@pytest.mark.parametrize("shape", [None, (3, 1, 1), (2, 3, 5, 1), (1, 1), (7,), (3, 1, 7)])
def test_first_second_and_forward_derivatives(shape):
    rows = rows_of()
    factor = None if shape is None else torch.rand(shape, dtype=torch.float64).requires_grad_()
    function = lambda rows, factor: unit_rows(rows, EPS, factor)  # noqa: E731
    assert gradcheck(function, (rows, factor), check_forward_ad=True, atol=1e-4)
    longer = torch.randn(2, 3, 2, 4, dtype=torch.float64, requires_grad=True)
    if factor is not None:
        sizes = [min(n, m) for n, m in zip(shape, longer.shape[-len(shape) :], strict=True)]
        factor = torch.rand(sizes, dtype=torch.float64, requires_grad=True)
    assert gradgradcheck(function, (longer, factor))


@pytest.mark.parametrize("shape", [(3, 1, 1), (7,)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_gradient_is_that_of_the_plain_form(dtype, shape):
    rows, factor = rows_of(dtype), torch.rand(shape, requires_grad=True)
    grad = torch.randn_like(rows)
    found = torch.autograd.grad(unit_rows(rows, EPS, factor), (rows, factor), grad)
    expected = torch.autograd.grad(plain(rows, factor), (rows, factor), grad)
    loose = {} if dtype == torch.float32 else {"rtol": 0.02, "atol": 0.02}
    torch.testing.assert_close(found, expected, **loose)


def test_rows_longer_than_eps_are_those_of_torch():
    rows = torch.randn(3, 5, 7, dtype=torch.float64, requires_grad=True)
    grad = torch.randn_like(rows)
    torch.testing.assert_close(unit_rows(rows), F.normalize(rows, dim=-1))
    found = torch.autograd.grad(unit_rows(rows), rows, grad)
    torch.testing.assert_close(found, torch.autograd.grad(F.normalize(rows, dim=-1), rows, grad))


def test_a_row_of_zeros_stays_zero_with_a_zero_gradient():
    rows = torch.randn(4, 7, dtype=torch.float64)
    rows[2] = 0
    rows.requires_grad_()
    unit = unit_rows(rows)
    unit.sum().backward()
    assert unit[2].eq(0).all()
    assert rows.grad[2].eq(0).all()
    assert rows.grad[0].ne(0).any()


def test_a_row_that_is_not_finite_says_so():
    rows = torch.randn(2, 7)
    rows[1, 3] = torch.inf
    assert unit_rows(rows)[1].isnan().any()
    assert unit_rows(rows)[0].isfinite().all()


def test_transforms_and_a_gradient_under_them_see_the_same():
    rows = torch.randn(3, 5, 7, dtype=torch.float64)
    expected = torch.stack([unit_rows(part) for part in rows])
    torch.testing.assert_close(torch.vmap(unit_rows)(rows), expected)
    of_each = torch.func.vmap(torch.func.grad(lambda part: unit_rows(part).sin().sum()))(rows)
    leaf = rows.clone().requires_grad_()
    unit_rows(leaf).sin().sum().backward()
    torch.testing.assert_close(of_each, leaf.grad)


def test_a_backward_pass_under_autocast_keeps_the_precision_of_the_forward_pass():
    rows, factor = rows_of(torch.float32), torch.rand(3, 1, 1, requires_grad=True)
    unit = unit_rows(rows, EPS, factor)
    grad = torch.randn_like(rows)
    expected = torch.autograd.grad(unit, (rows, factor), grad, retain_graph=True)
    with torch.autocast("cpu", torch.bfloat16):
        found = torch.autograd.grad(unit, (rows, factor), grad)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("shape", [(3, 1, 1), (7,)])
def test_a_factor_may_be_wider_than_its_rows(shape):
    rows, factor = rows_of(torch.float32), torch.rand(shape, dtype=torch.float64)
    factor.requires_grad_()
    wide = rows.detach().double().requires_grad_()
    grad = torch.randn_like(rows)
    found = torch.autograd.grad(unit_rows(rows, EPS, factor), (rows, factor), grad)
    expected = torch.autograd.grad(unit_rows(wide, EPS, factor), (wide, factor), grad.double())
    assert [part.dtype for part in found] == [torch.float32, torch.float64]
    torch.testing.assert_close(found, expected, check_dtype=False, rtol=1e-5, atol=1e-5)


def test_small_factors_of_half_precision_rows_keep_their_digits():
    rows, factor = rows_of(torch.float16), torch.full((7,), 1e-5).half().requires_grad_()
    wide = [tensor.detach().double().requires_grad_() for tensor in (rows, factor)]
    grad = torch.randn_like(rows)
    found = torch.autograd.grad(unit_rows(rows, EPS, factor), (rows, factor), grad)
    expected = torch.autograd.grad(unit_rows(*wide[:1], EPS, wide[1]), wide, grad.double())
    torch.testing.assert_close(found, expected, check_dtype=False, rtol=5e-3, atol=1e-5)


@pytest.mark.parametrize("factor", [0.0, 1e-20, 1e20])
def test_a_factor_that_cannot_be_divided_out_leaves_the_gradient_exact(factor):
    rows = torch.randn(3, 7).requires_grad_()
    factors = torch.ones(7)
    factors[2] = factor
    factors.requires_grad_()
    found = torch.autograd.grad(unit_rows(rows, EPS, factors)[:, :2].sum(), (rows, factors))
    expected = torch.autograd.grad(plain(rows, factors)[:, :2].sum(), (rows, factors))
    torch.testing.assert_close(found, expected)


LAYOUTS = {
    "rows": lambda: torch.randn(2, 3, 5, 7),
    "heads side by side": lambda: torch.randn(2, 5, 3, 7).transpose(1, 2),
    "fused": lambda: torch.randn(2, 5, 3, 3, 7).permute(2, 0, 3, 1, 4)[1],
    "columns": lambda: torch.randn(2, 3, 7, 5).mT,
    "expanded": lambda: torch.randn(2, 1, 5, 7).expand(-1, 3, -1, -1),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [None, (3, 1, 1), (7,)])
def test_rows_lie_in_memory_as_they_came(layout, shape):
    rows = LAYOUTS[layout]()
    factor = None if shape is None else torch.rand(shape).add_(0.1).requires_grad_()
    unit = unit_rows(rows.requires_grad_(), EPS, factor)
    assert unit.stride() == torch.empty_like(rows).stride()
    learning = (rows,) if factor is None else (rows, factor)
    grad = torch.randn(2, 5, 3, 7).transpose(1, 2)
    found = torch.autograd.grad(unit, learning, grad)
    wide = [tensor.detach().double().contiguous().requires_grad_() for tensor in learning]
    expected = plain(*wide)
    torch.testing.assert_close(unit, expected, check_dtype=False)
    for part, other in zip(found, torch.autograd.grad(expected, wide, grad.double()), strict=True):
        torch.testing.assert_close(part, other, check_dtype=False)


def test_a_half_precision_factor_of_wide_rows_does_not_overflow():
    rows, factor = torch.randn(3, 7).requires_grad_(), torch.full((7,), 2.0**12).half()
    factor.requires_grad_()
    grad = torch.randn_like(rows)
    found = torch.autograd.grad(unit_rows(rows, EPS, factor), (rows, factor), grad)
    expected = torch.autograd.grad(plain(rows, factor), (rows, factor), grad)
    assert [part.dtype for part in found] == [torch.float32, torch.float16]
    torch.testing.assert_close(found[0], expected[0])
    torch.testing.assert_close(found[1], expected[1])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_takes_no_digits_from_a_norm(layout, dtype):
    rows = 300 * LAYOUTS[layout]()  # squares beyond half precision
    with torch.autocast("cpu", dtype=dtype):
        unit = unit_rows(rows)
    torch.testing.assert_close(unit, unit_rows(rows), rtol=0, atol=0)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_half_precision_norms_do_not_overflow_on_the_way(layout):
    rows = (300 * LAYOUTS[layout]()).half()
    expected = rows.double().norm(dim=-1, keepdim=True)
    torch.testing.assert_close(row_norms(rows).double(), expected, rtol=1e-3, atol=0)


@pytest.mark.parametrize("first", [0.0, 1e-12, 1e12])
def test_second_derivatives_where_the_factor_cannot_be_divided_out(first):
    rows = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    factor = torch.tensor([first, 1.0, 2.0, 3.0], dtype=torch.float64, requires_grad=True)
    # Coordinates of 1e12 leave a difference quotient no digits; the norm sees them all the same.
    shown = slice(0 if first < 1 else 1, None)
    assert gradgradcheck(lambda r, f: unit_rows(r, EPS, f)[:, shown], (rows, factor))


def test_second_derivatives_of_half_precision_rows_with_a_factor_per_coordinate():
    rows, factor = torch.randn(3, 4).half().requires_grad_(), torch.rand(4) + 0.5

    def curvature(rows, form):
        (grad,) = torch.autograd.grad(form(rows, factor).sin().sum(), rows, create_graph=True)
        return torch.autograd.grad(grad.square().sum(), rows)[0]

    found = curvature(rows, lambda rows, factor: unit_rows(rows, EPS, factor))
    expected = curvature(rows.detach().double().requires_grad_(), plain)
    torch.testing.assert_close(found.double(), expected, rtol=0.02, atol=0.02)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:FutureWarning")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_tangent_goes_along_in_every_layout(layout):
    rows = LAYOUTS[layout]().double()
    tangent = torch.randn_like(rows)
    with forward_ad.dual_level():
        found = forward_ad.unpack_dual(unit_rows(forward_ad.make_dual(rows, tangent))).tangent
    _, expected = torch.func.jvp(lambda rows: F.normalize(rows, dim=-1), (rows,), (tangent,))
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(("factor", "size"), [(1e6, 1e28), (4e9, 1e20), (1e-4, 1e-30)])
def test_a_gradient_is_as_large_as_it_is(factor, size):
    rows, factors = torch.randn(3, 7).requires_grad_(), torch.full((7,), factor)
    grad = torch.randn_like(rows)
    (found,) = torch.autograd.grad(unit_rows(rows, EPS, factors), rows, grad * size)
    (expected,) = torch.autograd.grad(plain(rows.double(), factors.double()), rows, grad.double())
    scale = factor * size
    torch.testing.assert_close(found / scale, expected / factor, rtol=1e-4, atol=1e-4)


def test_a_row_too_short_to_have_a_norm_is_one_of_zeros():
    rows = torch.full((1, 4), 1e-24).requires_grad_()
    unit = unit_rows(rows)
    unit.sum().backward()
    assert unit.eq(0).all()
    assert rows.grad.eq(0).all()


def test_a_half_precision_factor_with_a_zero_cannot_be_divided_out():
    rows, factor = torch.randn(3, 4).requires_grad_(), torch.tensor([0.0, 1.0, 2.0, 3.0]).half()
    found = torch.autograd.grad(
        unit_rows(rows, EPS, factor.requires_grad_()).sum(), (rows, factor)
    )
    expected = torch.autograd.grad(plain(rows, factor).sum(), (rows, factor))
    torch.testing.assert_close(found, expected)


def test_a_narrow_length_costs_the_gradient_no_digits():
    rows, factor = torch.randn(3, 4, dtype=torch.float64).requires_grad_(), torch.rand(3, 1) + 0.5
    grad = torch.randn_like(rows)
    (found,) = torch.autograd.grad(unit_rows(rows, EPS, factor), rows, grad)
    (expected,) = torch.autograd.grad(plain(rows, factor), rows, grad)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_whole_numbers_have_no_unit_rows():
    with pytest.raises(ValueError, match="rows must be floating-point, got torch.int64"):
        unit_rows(torch.arange(6).view(2, 3))
