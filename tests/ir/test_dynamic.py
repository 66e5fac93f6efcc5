"""Sizes that vary: of a call, of the program it runs on, and what is padded and cut between."""

import msgspec
import pytest
import torch

from shardwright.errors import InputError
from shardwright.ir.dynamic import DynamicShapes, DynamicSize, padded, sizes_text

SHAPES = DynamicShapes(
    {
        "batch": DynamicSize({"x": (0,), "mask": (0,)}, {"y": (0,)}, "rows", buckets=(1, 4, 10)),
        "length": DynamicSize({"x": (1,), "mask": (1, 2)}, {"y": (1,)}, "mask"),
        "width": DynamicSize({"x": (2,)}, reason="it is a weight's"),
    },
    masks=("mask",),
)


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ((1, 1, 1), (1, 1, 1)),
        ((2, 2, 2), (4, 2, 2)),
        ((4, 3, 3), (4, 4, 3)),
        ((5, 129, 7), (10, 256, 7)),
        ((11, 128, 8), (11, 128, 8)),
    ],
)
def test_rounding(sizes: tuple[int, ...], expected: tuple[int, ...]) -> None:
    named = dict(zip(SHAPES.sizes, sizes, strict=True))
    assert tuple(SHAPES.rounded(named).values()) == expected


def test_a_call_is_padded_and_its_result_cut() -> None:
    x, mask = torch.randn(3, 5, 7), torch.ones(3, 5, 5)
    sizes = SHAPES.of({"x": x.shape, "mask": mask.shape})
    assert sizes_text(sizes) == "batch=3,length=5,width=7"
    made = SHAPES.rounded(sizes)
    found = SHAPES.pad({"x": x, "mask": mask, "other": x}, made)
    assert found["x"].shape == (4, 8, 7)
    assert found["mask"].shape == (4, 8, 8)
    assert found["other"] is x
    assert torch.equal(found["x"][:3, :5], x)
    assert torch.equal(found["x"][3], found["x"][2]), "rows are copies of the last"
    assert torch.equal(found["x"][:, 7], found["x"][:, 4])
    assert found["mask"].sum() == 4 * 5 * 5, "a mask leaves out what is padded, not its own rows"
    y = torch.randn(12, 8)  # three elements a row
    assert torch.equal(SHAPES.cut({"y": y}, sizes, made)["y"], y[:9, :5])
    assert SHAPES.cut({"y": y}, made, made)["y"] is y


@pytest.mark.parametrize(
    ("x", "mask", "message"),
    [
        ((3, 5, 7), (4, 5, 5), r"'batch' is 3 in one input and 4 in dimension 0 of 'mask'"),
        ((3, 5, 7), (3, 5, 6), r"'length' is 5 in one input and 6 in dimension 2 of 'mask'"),
        ((3, 5), (3, 5, 5), r"'x' has the shape \[3, 5\]; its dimension 2 is the size 'width'"),
        ((0, 5, 7), (0, 5, 5), r"dimension 0 is the size 'batch', from 1 up"),
    ],
)
def test_sizes_that_do_not_agree(x: tuple[int, ...], mask: tuple[int, ...], message: str) -> None:
    with pytest.raises(InputError, match=message):
        SHAPES.of({"x": x, "mask": mask})


def test_sizes_that_are_missing() -> None:
    with pytest.raises(InputError, match="batch were given; the program has batch, length, width"):
        SHAPES.rounded({"batch": 2})


def test_padding_leaves_what_is_long_enough() -> None:
    x = torch.ones(2, 3, dtype=torch.bool)
    assert padded(x, 0, 2) is x
    assert not padded(x, 1, 5, zeros=True)[:, 3:].any()


def test_text_and_json() -> None:
    assert str(SHAPES).splitlines() == [
        "batch of x[0], mask[0]: padded to 1, 4, 10 with copies of the last row; y[0] cut",
        "length of x[1], mask[1], mask[2]: padded to powers of two with what the mask leaves out; "
        "y[1] cut",
        "width of x[2]: a program for each size: it is a weight's",
    ]
    assert msgspec.json.decode(msgspec.json.encode(SHAPES), type=DynamicShapes) == SHAPES
