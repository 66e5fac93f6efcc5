"""Batches cut in microbatches, and outputs put together."""

from __future__ import annotations

import pytest
import torch

from shardwright.engine.generator import Generator, InputRows
from shardwright.engine.program import Microbatching
from shardwright.errors import InputError
from tests.runtime.linear_step import ROWS, WIDTH, linear_step
from tests.runtime.sketch import chain

X = torch.arange(float(ROWS * WIDTH)).double().reshape(ROWS, WIDTH)
TARGET = -X


def test_each_slot_gets_its_rows_of_each_microbatch() -> None:
    generator = Generator(linear_step("gpipe", microbatches=2, data=2))
    cut = generator.cut((X, TARGET), {"lr": 0.5})
    assert list(cut) == ["d0", "d1", "d2", "d3"]
    assert torch.equal(cut["d1"]["x.1"], torch.stack([X[2:4], X[6:8]]))
    assert torch.equal(cut["d2"]["target.0"], torch.stack([TARGET[0:2], TARGET[4:6]]))
    assert cut["d3"].keys() == {"target.1", "lr.1.1"}
    assert torch.equal(cut["d3"]["lr.1.1"], torch.tensor(0.5).double())


def test_outputs_come_together() -> None:
    generator = Generator(linear_step("gpipe", microbatches=2, data=2))
    outputs = {"h2.0": torch.stack([X[0:2], X[4:6]]), "h2.1": torch.stack([X[2:4], X[6:8]])}
    found = generator.join({"loss": torch.tensor(3.0).double(), **outputs})
    assert {name: tensor.tolist() for name, tensor in found.items()} == {
        "loss": 3.0,
        "y": X.tolist(),
    }


def test_an_output_of_one_microbatch_need_not_be_cut() -> None:
    pipeline = linear_step(microbatches=1)
    assert pipeline.training is not None
    assert pipeline.training.microbatches is not None
    del pipeline.training.microbatches.dim["y"]
    assert Microbatching.of(pipeline).outputs == {"h2.0": None}
    found = Generator(pipeline).join({"loss": torch.zeros(()).double(), "h2.0": X[None]})
    assert torch.equal(found["y"], X)


def test_a_model_is_not_cut() -> None:
    assert Microbatching.of(chain(2)) == Microbatching(1, {}, {})


@pytest.mark.parametrize(
    ("slot", "x", "target"),
    [
        ("d0", ((0, 2), (4, 6)), ()),
        ("d1", ((2, 4), (6, 8)), ()),
        ("d3", (), ((2, 4), (6, 8))),
    ],
)
def test_the_rows_that_a_slot_reads(slot: str, x: tuple, target: tuple) -> None:
    pipeline = linear_step("gpipe", microbatches=2, data=2)
    generator = Generator(pipeline, slot)
    rows = generator.own_rows(slot)
    assert rows == {"x": InputRows(0, x), "target": InputRows(0, target)}
    own = [
        torch.cat([tensor[start:end] for start, end in found.ranges] or [tensor[:0]])
        for tensor, found in zip((X, TARGET), rows.values(), strict=True)
    ]
    cut, whole = generator.cut(own, {"lr": 1.0}), generator.cut((X, TARGET), {"lr": 1.0})
    assert cut[slot].keys() == whole[slot].keys()
    assert all(torch.equal(cut[slot][name], tensor) for name, tensor in whole[slot].items())
    with pytest.raises(InputError, match=r"or the \d rows of it that this rank reads"):
        generator.cut((X[:3], TARGET), {"lr": 1.0})


def test_rows_that_touch_are_one_range() -> None:
    generator = Generator(linear_step(microbatches=4))
    assert generator.own_rows("d0")["x"] == InputRows(0, ((0, ROWS),))
