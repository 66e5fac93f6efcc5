"""How `SynchronousPipeline` cuts inputs and joins outputs, by shapes and by the caller's word."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from shardwright.codegenerate.synchronous import SynchronousPipeline
from shardwright.errors import InputError, WorkerError
from tests.codegenerate.staged import Stage, assert_close, chain, configured, gradients, perceptron


def test_a_loss_is_a_mean_over_microbatches() -> None:
    model = perceptron()
    configuration = chain(model, 4)
    loss = Stage({}, lambda stage, y: (F.mse_loss(y, torch.ones_like(y)), y))
    configuration[2] = {"inputs": ["output"], "outputs": ["loss", "same"], "model": loss}
    configuration["model outputs"] = ["loss"]
    x = torch.randn(5, 6, dtype=torch.float64)
    expected = F.mse_loss(model(x), torch.ones_like(x))
    expected.backward()
    wanted = gradients(model)
    with SynchronousPipeline(configuration, 2, reduce={"loss": "mean"}) as pipeline:
        found = pipeline(x)
        torch.testing.assert_close(found, expected)
        found.backward()
    assert_close(gradients(model), wanted)
    with (
        SynchronousPipeline(configuration, 2) as pipeline,
        pytest.raises(InputError, match=r"'loss' of the first microbatch is torch\.float64\[\]"),
    ):
        pipeline(x)
    with SynchronousPipeline(configuration, 1) as pipeline:
        assert torch.equal(pipeline(x), expected)


def table(stage: Any, x: Tensor, weights: Tensor) -> Tensor:
    return x @ weights


def test_the_caller_says_what_is_cut() -> None:
    x, weights = torch.randn(4, 4), torch.randn(4, 4)
    configuration = configured(
        [(["x", "weights"], ["output"], Stage({}, table))], inputs=["x", "weights"]
    )
    with SynchronousPipeline(configuration, 2, batched=("x",)) as pipeline:
        torch.testing.assert_close(pipeline(x, weights), x @ weights)
    with SynchronousPipeline(configuration, 2, batched=("x", "weights")) as pipeline:
        with pytest.raises(WorkerError, match="stage 0, microbatch 0: forward: RuntimeError"):
            pipeline(x, weights)
        with pytest.raises(InputError, match="must be equally long along dimension 0"):
            pipeline(x, torch.randn(3, 4))


def test_another_dimension_is_cut() -> None:
    model = perceptron()
    x = torch.randn(3, 4, 6, dtype=torch.float64)
    with SynchronousPipeline(chain(model, 4), 2, batch_dim=1) as pipeline:
        torch.testing.assert_close(pipeline(x), model(x))


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        ((), {}, r"0 positional arguments and the names \[\] were given; the inputs are: x"),
        ((1, 2), {}, "2 positional arguments"),
        ((torch.ones(2, 6),), {"x": torch.ones(2, 6)}, r"the names \['x'\]"),
        ((), {"y": torch.ones(2, 6)}, r"the names \['y'\]"),
        (([torch.ones(2, 6)],), {}, "the input 'x' is a list"),
        ((1.0,), {}, "no input has a dimension 0"),
        ((torch.ones(1, 6),), {}, "a batch of 1 rows cannot be cut in 2 microbatches"),
    ],
)
def test_arguments_that_do_not_fit(args: Any, kwargs: Any, message: str) -> None:
    pipeline = SynchronousPipeline(chain(perceptron(), 4), 2)
    with pytest.raises(InputError, match=message):
        pipeline(*args, **kwargs)


class Captured(Stage):
    """Partition 0 of a model.

    Takes mask f64[6], rows
        f64[2, 6], x f64[2,
        6].
    Gives output f64[2, 6].
    """


@pytest.mark.parametrize(
    ("microbatches", "rows", "width", "message"),
    [
        (2, 4, 6, None),
        (4, 8, 6, None),
        (
            2,
            8,
            6,
            r"'x' is \[8, 6\], .* \[2, 6\].*; give 4 rows in 2 .*, or 4 microbatches, or cap",
        ),
        (4, 7, 6, r"'x' is \[7, 6\].*; give 8 rows in 4 microbatches, or capture"),
        (1, 4, 6, r"'x' is \[4, 6\].*; give 2 rows in 1 microbatch, or 2 microbatches, or capture"),
        (4, 2, 6, r"no input is 4 times as long along dimension 0 as in a microbatch"),
        (2, 4, 5, r"'x' is \[4, 5\].*; pad or cut it"),
    ],
)
def test_shapes_that_stages_were_not_captured_with(
    microbatches: int, rows: int, width: int, message: str | None
) -> None:
    stage = Captured({}, lambda stage, x, mask: x * mask)
    configuration = configured([(["x", "mask"], ["output"], stage)], inputs=["x", "mask"])
    pipeline = SynchronousPipeline(configuration, microbatches)
    x, mask = torch.ones(rows, width), torch.ones(6)
    if message is None:
        assert torch.equal(pipeline(x, mask), x)
    else:
        with pytest.raises(InputError, match=message):
            pipeline(x, mask)
    with pytest.raises(InputError, match=r"'mask' is \[5\]"):
        pipeline(torch.ones(2 * microbatches, 6), torch.ones(5))


class Biased(Stage):
    """Takes x f64[2, 4], bias f64[8, 8]. Gives output f64[2, 8]."""


def biased(stage: Any, x: Tensor, bias: Tensor) -> Tensor:
    return F.pad(x, (0, 4)) + bias.sum(0)


def test_an_input_as_long_as_the_batch_stays_whole_where_it_was_captured_so() -> None:
    x, bias = torch.randn(8, 4, dtype=torch.float64), torch.randn(8, 8, dtype=torch.float64)
    configuration = configured(
        [(["x", "bias"], ["output"], Biased({}, biased))], inputs=["x", "bias"]
    )
    expected = biased(None, x, bias)
    for batched in (None, ("x",)):
        pipeline = SynchronousPipeline(configuration, 4, batched=batched)
        assert torch.equal(pipeline(x, bias), expected)
    pipeline = SynchronousPipeline(configuration, 4, batched=("x", "bias"))
    with pytest.raises(InputError, match=r"'bias' is \[8, 8\].*; leave 'bias' out of batched="):
        pipeline(x, bias)
    pipeline = SynchronousPipeline(configuration, 4, batched=("bias",))
    with pytest.raises(InputError, match=r"'x' is \[8, 4\].*; name it in batched="):
        pipeline(x, torch.randn(32, 8))


class Flat(Stage):
    """Takes labels i64[6], x f64[2, 3]. Gives output f64[2, 3]."""


def test_inputs_are_cut_each_by_its_own_rows() -> None:
    labels, x = torch.arange(12), torch.randn(4, 3, dtype=torch.float64)
    stage = Flat({}, lambda stage, labels, x: x + labels.view(2, 3))
    configuration = configured([(["labels", "x"], ["output"], stage)], inputs=["labels", "x"])
    found = SynchronousPipeline(configuration, 2)(labels, x)
    assert torch.equal(found, x + labels.view(4, 3))


def test_an_output_as_long_as_a_microbatch_needs_a_word() -> None:
    weight = torch.randn(2, 3)
    stage = Stage({}, lambda stage, x: (x, weight.sum(1)))
    configuration = configured([(["x"], ["same", "total"], stage)], outputs=["same", "total"])
    x = torch.randn(4, 3)
    same, total = SynchronousPipeline(configuration, 2, reduce={"total": "first"})(x)
    assert torch.equal(same, x)
    assert torch.equal(total, weight.sum(1))


def test_a_loss_over_some_rows_is_a_sum_over_a_count() -> None:
    model = perceptron()

    def compute(stage: Any, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        for child in stage.children():
            x = child(x)
        return F.cross_entropy(x, labels, reduction="sum"), (labels != -100).sum()

    stage = Stage(dict(model.named_children()), compute)
    configuration = configured(
        [(["x", "labels"], ["total", "count"], stage)], ["x", "labels"], ["total", "count"]
    )
    x, labels = torch.randn(4, 6, dtype=torch.float64), torch.tensor([1, -100, 2, 5])
    expected = F.cross_entropy(model(x), labels)
    expected.backward()
    wanted = gradients(model)
    with SynchronousPipeline(configuration, 2, reduce={"total": "sum", "count": "sum"}) as pipeline:
        total, count = pipeline(x, labels)
        torch.testing.assert_close(total / count, expected)
        (total / count).backward()
    assert_close(gradients(model), wanted)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"microbatches": 0}, "0 microbatches along dimension 0"),
        ({"batch_dim": -1}, "along dimension -1"),
        ({"batched": ("y",)}, "batched= names 'y'; the model's inputs are: x"),
        ({"reduce": {"y": "mean"}}, "reduce= names 'y'; the model's outputs are: output"),
        ({"reduce": {"output": "max"}}, "reduce= says 'max' for 'output'"),
    ],
)
def test_options_that_do_not_fit(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        SynchronousPipeline(chain(perceptron(), 4), **{"microbatches": 2, **options})
