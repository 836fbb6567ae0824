"""Weight selection: the published index rule, by hand."""

import pytest
import torch

from levelhead.init.weight_selection import (
    select_weight,
    select_weights,
    selected_indices,
    teacher_names,
    weight_selection,
)


@pytest.mark.parametrize(
    ("teacher", "student", "expected"),
    [
        (12, 4, [0, 3, 6, 9]),
        (12, 12, list(range(12))),
        (10, 4, [0, 3, 6, 9]),
        (11, 4, [0, 3, 7, 10]),
        (7, 3, [0, 3, 6]),
        (5, 1, [0]),
    ],
)
def test_indices_by_hand(teacher, student, expected):
    assert selected_indices(teacher, student).tolist() == expected


def test_a_matrix_by_hand():
    teacher = torch.arange(24.0).reshape(4, 6)
    # 2 divides 4: rows 0, 2. 4 does not divide 6: round(0, 5/3, 10/3, 5) = 0, 2, 3, 5.
    expected = torch.tensor([[0.0, 2, 3, 5], [12, 14, 15, 17]])
    assert torch.equal(select_weight(teacher, (2, 4)), expected)


def test_selection_commutes_with_transposition():
    teacher = torch.randn(7, 12)
    assert torch.equal(select_weight(teacher, (3, 8)).T, select_weight(teacher.T, (8, 3)))


@pytest.mark.parametrize(("teacher", "student"), [(11, 7), (13, 12), (9, 2), (384, 192)])
def test_a_fused_tensor_keeps_its_three_parts_apart(teacher, student):
    parts = selected_indices(3 * teacher, 3 * student) // teacher
    assert parts.tolist() == [0] * student + [1] * student + [2] * student


def names(prefix, count):
    return [f"{prefix}.{i}.weight" for i in range(count)]


def test_layers_first_and_uniform():
    student, teacher = names("blocks", 3), names("blocks", 7)
    first = teacher_names(student, teacher, "first")
    assert list(first.values()) == names("blocks", 3)
    uniform = teacher_names(student, teacher, "uniform")
    assert list(uniform.values()) == [f"blocks.{i}.weight" for i in (0, 3, 6)]


def test_stages_pair_with_stages_and_their_blocks_with_blocks():
    student = [f"layers.{s}.blocks.{b}.w" for s, n in ((0, 1), (1, 2)) for b in range(n)]
    teacher = [f"layers.{s}.blocks.{b}.w" for s, n in ((0, 2), (1, 4)) for b in range(n)]
    uniform = teacher_names(student, teacher, "uniform")
    assert uniform["layers.0.blocks.0.w"] == "layers.0.blocks.0.w"
    assert uniform["layers.1.blocks.1.w"] == "layers.1.blocks.2.w"


def state(width, layers, classes=10):
    weights = {f"blocks.{i}.qkv.weight": torch.randn(3 * width, width) for i in range(layers)}
    weights["head.weight"] = torch.randn(classes, width)
    weights["index"] = torch.arange(width)
    return weights


def test_whole_model_leaves_the_classifier_and_integers_out():
    student, teacher = state(6, 2), state(9, 4, classes=3)
    selected = select_weights(student, teacher=teacher)
    assert sorted(selected) == ["blocks.0.qkv.weight", "blocks.1.qkv.weight"]
    rows, columns = selected_indices(27, 18), selected_indices(9, 6)
    expected = teacher["blocks.1.qkv.weight"][rows][:, columns]
    assert torch.equal(selected["blocks.1.qkv.weight"], expected)


def test_a_selection_reads_the_teacher_when_it_is_looked_up_and_holds_nothing():
    student, teacher = state(6, 2), state(9, 4, classes=3)
    selection = weight_selection(student, teacher=teacher)
    assert len(selection) == 2
    teacher["blocks.1.qkv.weight"].fill_(7)
    for name, values in select_weights(student, teacher=teacher).items():
        assert torch.equal(selection[name], values)
    assert (selection["blocks.1.qkv.weight"] == 7).all()
    selection["blocks.1.qkv.weight"].zero_()
    assert (teacher["blocks.1.qkv.weight"] == 7).all()


@pytest.mark.parametrize("shape", [(), (3,), (2, 3)])
def test_what_is_selected_is_a_copy_even_where_all_of_it_is(shape):
    teacher = torch.ones(shape)
    select_weight(teacher, shape).zero_()
    assert (teacher == 1).all()


def test_teachers_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="blocks.0.qkv.weight: every dimension of the student"):
        select_weights(state(9, 2), teacher=state(6, 2))
    with pytest.raises(ValueError, match=r"1 without, first \['blocks.2.qkv.weight"):
        select_weights(state(6, 3), teacher=state(9, 2))
    with pytest.raises(ValueError, match="unknown layers 'last'; known: first, uniform"):
        select_weights(state(6, 2), teacher=state(9, 2), layers="last")
    with pytest.raises(ValueError, match="as many dimensions"):
        select_weight(torch.zeros(3, 3), (3,))
