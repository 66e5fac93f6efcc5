"""`SynchronousPipeline`: outputs and gradients, held against the model that was cut."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from shardwright.errors import InputError, RunError, WorkerError
from shardwright.runtime.sweeps import _Progress
from shardwright.runtime.synchronous import SynchronousPipeline
from tests.runtime.staged import (
    Stage,
    assert_close,
    assert_equal,
    chain,
    configured,
    gradients,
    perceptron,
)

PATIENCE = 30.0
"""Seconds that a stage waits for another one, where tests let them meet."""


def in_microbatches(model: nn.Module, x: Tensor, sizes: list[int]) -> None:
    """Differentiate the model's mean square eagerly, microbatch by microbatch."""
    for part in x.split(sizes):
        (model(part).square().sum() / x.shape[0]).backward()


@pytest.mark.parametrize("cuts", [(), (4,), (2, 4, 6)])
def test_one_microbatch_gives_the_gradients_of_the_model_bit_for_bit(cuts: tuple[int, ...]) -> None:
    model = perceptron(dtype=torch.float32)
    x = torch.randn(5, 6)
    expected = model(x)
    expected.square().sum().backward()
    wanted = gradients(model)
    with SynchronousPipeline(chain(model, *cuts), 1) as pipeline:
        found = pipeline(x)
        assert torch.equal(found, expected)
        found.square().sum().backward()
    assert_equal(gradients(model), wanted)


@pytest.mark.parametrize("checkpoint", [False, True])
@pytest.mark.parametrize(
    ("rows", "sizes"), [(8, [4, 4]), (8, [2, 2, 2, 2]), (7, [3, 2, 2]), (3, [1, 1, 1])]
)
def test_microbatches_give_the_gradients_of_the_same_eager_ones(
    rows: int, sizes: list[int], checkpoint: bool
) -> None:
    model = perceptron()
    x = torch.randn(rows, 6, dtype=torch.float64)
    in_microbatches(model, x, sizes)
    wanted = gradients(model)
    configuration = chain(model, 2, 4)
    with SynchronousPipeline(configuration, len(sizes), checkpoint=checkpoint) as pipeline:
        for _ in range(2):
            found = pipeline(x)
            assert torch.equal(found, torch.cat([model(part) for part in x.split(sizes)]))
            (found.square().sum() / rows).backward()
            assert_close(gradients(model), wanted)


class Skipping(nn.Module):
    """Stages that each read any of what came before, and add it up."""

    def __init__(self, reads: list[list[int]]) -> None:
        super().__init__()
        self.reads = reads
        self.layers = nn.ModuleList(nn.Linear(3, 3, dtype=torch.float64) for _ in reads)

    def forward(self, x: Tensor) -> Tensor:
        made = [x]
        for layer, reads in zip(self.layers, self.reads, strict=True):
            made.append(torch.tanh(layer(torch.stack([made[i] for i in reads]).sum(0))))
        return made[-1]

    def configuration(self) -> dict[str | int, Any]:
        names = ["x", *(f"made{i}" for i in range(len(self.reads) - 1)), "output"]

        def compute(stage: nn.Module, *inputs: Tensor) -> Tensor:
            (layer,) = stage.layers.children()
            return torch.tanh(layer(torch.stack(inputs).sum(0)))

        stages = []
        for i, reads in enumerate(self.reads):
            layers = nn.ModuleDict({str(i): self.layers[i]})
            stages.append(
                ([names[j] for j in reads], [names[i + 1]], Stage({"layers": layers}, compute))
            )
        return configured(stages)


@st.composite
def skips(draw: st.DrawFn) -> list[list[int]]:
    count = draw(st.integers(1, 5))
    reads = [sorted(draw(st.sets(st.integers(0, i), min_size=1))) for i in range(count)]
    return reads


@settings(max_examples=40, deadline=None)
@given(skips(), st.integers(1, 4), st.integers(0, 3), st.booleans(), st.booleans())
def test_any_wiring_gives_the_gradients_of_the_model(
    reads: list[list[int]], microbatches: int, more: int, checkpoint: bool, differentiable: bool
) -> None:
    torch.manual_seed(0)
    model = Skipping(reads)
    x = torch.randn(microbatches + more, 3, dtype=torch.float64, requires_grad=differentiable)
    model(x).square().sum().backward()
    wanted, of_x = gradients(model), x.grad
    x.grad = None
    configuration = model.configuration()
    with SynchronousPipeline(configuration, microbatches, checkpoint=checkpoint) as pipeline:
        pipeline(x).square().sum().backward()
    assert_close(gradients(model), wanted)
    if of_x is not None:
        torch.testing.assert_close(x.grad, of_x)


def test_it_stands_within_a_larger_model() -> None:
    model = perceptron()
    before, after = nn.Linear(4, 6, dtype=torch.float64), nn.Linear(6, 2, dtype=torch.float64)
    whole = nn.Sequential(before, model, after)
    x = torch.randn(4, 4, dtype=torch.float64)
    whole(x).square().sum().backward()
    wanted = gradients(whole)
    piped = nn.Sequential(before, SynchronousPipeline(chain(model, 4), 2), after)
    assert list(piped.state_dict()) == list(whole.state_dict())
    piped(x).square().sum().backward()
    assert_close(gradients(piped), wanted)
    piped.load_state_dict(whole.state_dict())
    assert [name for name, _ in piped.named_parameters()] == list(wanted)


# --- concurrency and order ----------------------------------------------------------------


class Meeting(torch.autograd.Function):
    """An identity that calls back in its forward and in its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: Any, backward: Any) -> Tensor:
        ctx.backward = backward
        forward()
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        ctx.backward()
        return gradient, None, None


def met(model: nn.Sequential, before: Any, after: Any) -> dict[str | int, Any]:
    """A model in two stages, each of which reports (stage, row) of each microbatch."""
    children = list(model.named_children())

    def computing(number: int) -> Any:
        def compute(stage: nn.Module, x: Tensor, rows: Tensor) -> Any:
            place = number, int(rows[0])
            x = Meeting.apply(x, lambda: before(*place), lambda: after(*place))
            for child in stage.children():
                x = child(x)
            return (x, rows.clone()) if number == 0 else x

        return compute

    half = len(children) // 2
    return configured(
        [
            (["x", "rows"], ["y", "rows1"], Stage(dict(children[:half]), computing(0))),
            (["y", "rows1"], ["output"], Stage(dict(children[half:]), computing(1))),
        ],
        inputs=["x", "rows"],
    )


def test_stages_work_at_one_time() -> None:
    meetings = {
        name: threading.Barrier(2, timeout=PATIENCE) for name in ("first", "second", "back")
    }
    forward = {(0, 1): "first", (1, 0): "first", (0, 2): "second", (1, 1): "second"}
    backward = {(1, 1): "back", (0, 2): "back"}

    def meet(names: dict[tuple[int, int], str]) -> Any:
        return lambda *place: place in names and meetings[names[place]].wait()

    model = perceptron()
    x = torch.randn(3, 6, dtype=torch.float64, requires_grad=True)
    with SynchronousPipeline(met(model, meet(forward), meet(backward)), 3) as pipeline:
        pipeline(x, torch.arange(3)).sum().backward()
    assert not any(barrier.broken for barrier in meetings.values())
    assert x.grad is not None


def test_microbatches_go_forward_in_order_and_back_in_the_other() -> None:
    forward: list[tuple[int, int]] = []
    backward: list[tuple[int, int]] = []
    configuration = met(
        perceptron(), lambda *place: forward.append(place), lambda *place: backward.append(place)
    )
    x = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    with SynchronousPipeline(configuration, 4) as pipeline:
        pipeline(x, torch.arange(4)).sum().backward()
    for stage in (0, 1):
        assert [row for number, row in forward if number == stage] == [0, 1, 2, 3]
        assert [row for number, row in backward if number == stage] == [3, 2, 1, 0]
    for row in range(4):
        assert forward.index((0, row)) < forward.index((1, row))
        assert backward.index((1, row)) < backward.index((0, row))


def test_two_calls_before_a_backward_and_calls_from_two_threads() -> None:
    model = perceptron()
    x, y = torch.randn(2, 4, 6, dtype=torch.float64)
    (model(x) * model(y)).sum().backward()
    wanted = gradients(model)
    with SynchronousPipeline(chain(model, 4), 2) as pipeline:
        (pipeline(x) * pipeline(y)).sum().backward()
        assert_close(gradients(model), wanted)
        expected, parameters = [model(x), model(y)], list(model.parameters())
        found: list[list[Tensor]] = [[], []]

        def call(number: int) -> None:
            for _ in range(20):
                made = pipeline((x, y)[number])
                torch.autograd.grad(made.sum(), parameters)
                found[number].append(made)

        callers = [threading.Thread(target=call, args=(number,)) for number in (0, 1)]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join(PATIENCE)
        for number in (0, 1):
            assert len(found[number]) == 20
            for made in found[number]:
                torch.testing.assert_close(made, expected[number])


# --- modes --------------------------------------------------------------------------------


@pytest.mark.parametrize("microbatches", [1, 2])
def test_without_gradients(microbatches: int) -> None:
    model = perceptron()
    x = torch.randn(4, 6, dtype=torch.float64)
    with SynchronousPipeline(chain(model, 4), microbatches) as pipeline:
        with torch.no_grad():
            found = pipeline(x)
        assert not found.requires_grad
        with torch.inference_mode():
            assert pipeline(x).is_inference()
        model.requires_grad_(False)
        assert not pipeline(x).requires_grad
        x.requires_grad_()
        pipeline(x).sum().backward()
        expected = torch.autograd.grad(model(x).sum(), x)[0]
        torch.testing.assert_close(x.grad, expected)


def test_what_is_frozen_gets_no_gradient() -> None:
    model = perceptron()
    model[0].requires_grad_(False)
    x = torch.randn(4, 6, dtype=torch.float64)
    with SynchronousPipeline(chain(model, 2, 4), 2) as pipeline:
        pipeline(x).sum().backward()
    assert "0.weight" not in gradients(model)


class Reporting(nn.Module):
    """Notes what torch says of the thread that it runs in."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[Any, ...]] = []

    def forward(self, x: Tensor) -> Tensor:
        made = torch.nn.functional.linear(x, torch.eye(6))
        self.seen.append(
            (
                threading.current_thread().name,
                torch.is_grad_enabled(),
                made.dtype,
                torch.get_default_dtype(),
                torch.get_num_threads(),
            )
        )
        return x


def test_what_torch_keeps_for_each_thread_is_carried_over() -> None:
    first, second = Reporting(), Reporting()
    model = nn.Sequential(first, nn.Linear(6, 6), second)
    x = torch.randn(4, 6)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(4)
        with SynchronousPipeline(chain(model, 2), 2) as pipeline:
            pipeline(x)
            with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
                pipeline(x)
            torch.set_num_threads(2)
            pipeline(x)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)
    assert second.seen == [
        *[("stage 1", True, torch.float32, torch.float32, 2)] * 2,
        *[("stage 1", False, torch.bfloat16, torch.float32, 2)] * 2,
        *[("stage 1", True, torch.float32, torch.float32, 1)] * 2,
    ]
    assert [seen[0] for seen in first.seen] == ["stage 0"] * 6


def test_autocast_gives_what_it_gives_the_model() -> None:
    model = perceptron(dtype=torch.float32)
    x = torch.randn(4, 6)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = torch.cat([model(part) for part in x.split(2)])
    expected.float().square().sum().backward()
    wanted = gradients(model)
    with SynchronousPipeline(chain(model, 4), 2) as pipeline:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found = pipeline(x)
        found.float().square().sum().backward()
    assert torch.equal(found, expected)
    assert_close(gradients(model), wanted, 1e-2)


def test_random_numbers_follow_from_the_seed() -> None:
    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(6, 6), nn.Dropout(0.5), nn.Linear(6, 6))
    x = torch.randn(400, 6)

    def drawn(pipeline: nn.Module, seed: int) -> tuple[Tensor, dict[str, Tensor]]:
        torch.manual_seed(seed)
        found = pipeline(x)
        found.square().sum().backward()
        return found, gradients(model)

    with SynchronousPipeline(chain(model, 2), 4) as pipeline:
        first, wanted = drawn(pipeline, 1)
        for _ in range(3):
            again, found = drawn(pipeline, 1)
            assert torch.equal(again, first)
            assert_equal(found, wanted)
        assert not torch.equal(drawn(pipeline, 2)[0], first)
        assert not torch.equal(first[:100], pipeline(x)[:100])
        masks = pipeline.stages[0](torch.ones(100, 6)) == pipeline.stages[0](torch.ones(100, 6))
        assert not masks.all()
    with SynchronousPipeline(chain(model, 2), 4, checkpoint=True) as again:
        recomputed, found = drawn(again, 1)
        assert torch.equal(recomputed, first)
        assert_equal(found, wanted)


def test_one_microbatch_draws_what_the_model_draws() -> None:
    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(6, 6), nn.Dropout(0.5), nn.Linear(6, 6))
    x = torch.randn(4, 6)
    torch.manual_seed(3)
    expected = model(x)
    torch.manual_seed(3)
    assert torch.equal(SynchronousPipeline(chain(model, 2), 1)(x), expected)


def test_without_random_operators_the_generator_stays_as_it_is() -> None:
    model = perceptron()
    state = torch.get_rng_state()
    with SynchronousPipeline(chain(model, 4), 2) as pipeline:
        for _ in range(2):
            pipeline(torch.ones(4, 6, dtype=torch.float64))
    assert torch.equal(torch.get_rng_state(), state)


def test_buffers_change_as_in_the_model() -> None:
    def make() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 6, bias=False), nn.BatchNorm1d(6), nn.Tanh()).double()

    x = torch.randn(8, 6, dtype=torch.float64)
    for checkpoint in (False, True):
        expected, model = make(), make()
        in_microbatches(expected, x, [2, 2, 2, 2])
        with SynchronousPipeline(chain(model, 1), 4, checkpoint=checkpoint) as pipeline:
            (pipeline(x).square().sum() / 8).backward()
        assert_equal(dict(model.named_buffers()), dict(expected.named_buffers()))
        assert_close(gradients(model), gradients(expected))


# --- what passes between stages and out ----------------------------------------------------


class Branching(nn.Module):
    """Several outputs: an input, of an early stage, whole numbers, one of them twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 6, dtype=torch.float64)
        self.head = nn.Linear(6, 10, dtype=torch.float64)

    def forward(self, ids: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
        hidden, kept = self.embed(ids), ids % 2
        logits = self.head(hidden * mask) + kept.unsqueeze(-1)
        return logits, hidden, ids, kept, logits, mask

    def configuration(self) -> dict[str | int, Any]:
        def first(stage: Any, ids: Tensor) -> tuple[Tensor, Tensor]:
            return stage.embed(ids), ids % 2

        def second(stage: Any, hidden: Tensor, kept: Tensor, mask: Tensor) -> Tensor:
            return stage.head(hidden * mask) + kept.unsqueeze(-1)

        return configured(
            [
                (["ids"], ["hidden", "kept"], Stage({"embed": self.embed}, first)),
                (["hidden", "kept", "mask"], ["logits"], Stage({"head": self.head}, second)),
            ],
            inputs=["ids", "mask"],
            outputs=["logits", "hidden", "ids", "kept", "logits", "mask"],
        )


@pytest.mark.parametrize("microbatches", [1, 2, 3])
def test_outputs_of_all_kinds(microbatches: int) -> None:
    torch.manual_seed(0)
    model = Branching()
    ids, mask = torch.arange(12).reshape(3, 4) % 10, torch.randn(6, dtype=torch.float64)
    mask.requires_grad_()
    expected = model(ids, mask)
    (expected[0].sum() + expected[1].square().sum()).backward()
    wanted, of_mask = gradients(model), mask.grad
    mask.grad = None
    with SynchronousPipeline(model.configuration(), microbatches) as pipeline:
        found = pipeline(ids, mask=mask)
    assert len(found) == 6
    for number, (one, other) in enumerate(zip(found, expected, strict=True)):
        torch.testing.assert_close(one, other, msg=f"output {number}")
        assert one.requires_grad == other.requires_grad
    assert found[2] is ids
    assert found[5] is mask
    (found[0].sum() + found[1].square().sum()).backward()
    assert_close(gradients(model), wanted)
    torch.testing.assert_close(mask.grad, of_mask)


def test_results_may_be_changed_in_place() -> None:
    model = perceptron()
    model.append(nn.Linear(6, 6, dtype=torch.float64))
    x = torch.randn(4, 6, dtype=torch.float64)
    for microbatches in (1, 2):
        model(x).relu().sum().backward()
        wanted = gradients(model)
        SynchronousPipeline(chain(model, 4), microbatches)(x).relu_().sum().backward()
        assert_close(gradients(model), wanted)


def test_a_stage_that_gives_back_what_it_takes() -> None:
    layer = nn.Linear(3, 3, dtype=torch.float64)
    configuration = configured(
        [
            (["x"], ["same", "once"], Stage({"layer": layer}, lambda s, x: (x, s.layer(x)))),
            (["same", "once"], ["output"], Stage({}, lambda s, same, once: same * once)),
        ]
    )
    x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    expected = torch.autograd.grad((x * layer(x)).sum(), [x, *layer.parameters()])
    with SynchronousPipeline(configuration, 2) as pipeline:
        found = torch.autograd.grad(pipeline(x).sum(), [x, *layer.parameters()])
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


class Tied(nn.Module):
    """An embedding whose weight the last stage uses too, and a third time in between."""

    def __init__(self, *, sparse: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 6, dtype=torch.float64, sparse=sparse)
        self.middle = nn.Linear(6, 10, bias=False, dtype=torch.float64)
        self.head = nn.Linear(6, 10, bias=False, dtype=torch.float64)
        self.middle.weight = self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embed(ids)
        return self.head(torch.tanh(self.middle(hidden) @ self.middle.weight))

    def configuration(self) -> dict[str | int, Any]:
        def second(stage: Any, hidden: Tensor) -> Tensor:
            return torch.tanh(stage.middle(hidden) @ stage.middle.weight)

        return configured(
            [
                (["x"], ["hidden"], Stage({"embed": self.embed})),
                (["hidden"], ["mixed"], Stage({"middle": self.middle}, second)),
                (["mixed"], ["output"], Stage({"head": self.head})),
            ]
        )


@pytest.mark.parametrize("sparse", [False, True])
def test_gradients_of_tied_parameters_are_summed(sparse: bool) -> None:
    torch.manual_seed(0)
    model = Tied(sparse=sparse)
    ids = torch.arange(12).reshape(4, 3) % 10
    (model(ids).square().sum() / 4).backward()
    wanted = gradients(model)
    for microbatches in (1, 2, 4):
        with SynchronousPipeline(model.configuration(), microbatches) as pipeline:
            assert len(list(pipeline.parameters())) == 1
            (pipeline(ids).square().sum() / 4).backward()
        assert_close(gradients(model), wanted)


def test_hooks_see_the_whole_gradient_once() -> None:
    model = Tied()
    seen: list[Tensor] = []
    model.embed.weight.register_hook(lambda gradient: seen.append(gradient))
    ids = torch.arange(12).reshape(4, 3) % 10
    with SynchronousPipeline(model.configuration(), 2) as pipeline:
        pipeline(ids).sum().backward()
    assert len(seen) == 1
    torch.testing.assert_close(seen[0], model.embed.weight.grad)


# --- which inputs are cut, how outputs are joined --------------------------------------------


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


# --- failures --------------------------------------------------------------------------------


class Boom(Exception):
    pass


def failing(at: tuple[int, int]) -> Any:
    def fail(*place: int) -> None:
        if place == at:
            raise Boom("no luck")

    return fail


def nothing(*place: int) -> None:
    pass


@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_failures_name_stage_and_microbatch(phase: str, stage: int, microbatches: int) -> None:
    row = 2 if microbatches == 4 else 0
    fail = failing((stage, row))
    hooks = (fail, nothing) if phase == "forward" else (nothing, fail)
    model = perceptron()
    x = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    with SynchronousPipeline(met(model, *hooks), microbatches) as pipeline:
        for _ in range(2):
            with pytest.raises(
                WorkerError, match=f"stage {stage}, microbatch {row}: {phase}: Boom: no luck"
            ) as caught:
                pipeline(x, torch.arange(4)).sum().backward()
            assert isinstance(caught.value.__cause__, Boom)
            assert (caught.value.stage, caught.value.microbatch) == (stage, row)
        with torch.no_grad():
            ended = pipeline(x, torch.arange(10, 14))
        assert torch.equal(ended, torch.cat([model(part) for part in x.split(4 // microbatches)]))
    assert all(parameter in set(model.parameters()) for parameter in pipeline.parameters())


def test_an_interrupt_ends_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    reached, release = threading.Event(), threading.Event()

    def wait(stage: int, row: int) -> None:
        reached.set()
        release.wait(PATIENCE)

    wait_until_left, waits = _Progress.wait_until_left, []

    def interrupted_once(progress: _Progress) -> None:
        waits.append(progress)
        if len(waits) == 1:
            reached.wait(PATIENCE)
            release.set()
            raise KeyboardInterrupt
        wait_until_left(progress)

    model = perceptron()
    x = torch.randn(4, 6, dtype=torch.float64)
    with SynchronousPipeline(met(model, wait, nothing), 4) as pipeline:
        monkeypatch.setattr(_Progress, "wait_until_left", interrupted_once)
        with pytest.raises(KeyboardInterrupt):
            pipeline(x, torch.arange(4))
        assert torch.equal(pipeline(x, torch.arange(4))[:1], model(x[:1]))


def test_a_stage_that_returns_something_else() -> None:
    stage = Stage({}, lambda stage, x: (x, x))
    with pytest.raises(WorkerError, match=r"returned Tensor, Tensor; .* its outputs: output"):
        SynchronousPipeline(configured([(["x"], ["output"], stage)]), 1)(torch.ones(2))


def test_second_derivatives_are_refused() -> None:
    x = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    with (
        SynchronousPipeline(chain(perceptron(), 4), 2) as pipeline,
        pytest.raises(RunError, match="cannot be differentiated again"),
    ):
        torch.autograd.grad(pipeline(x).sum(), x, create_graph=True)


@pytest.mark.parametrize("checkpoint", [False, True])
@pytest.mark.parametrize("microbatches", [1, 2])
def test_a_graph_is_kept_where_that_is_asked_for(microbatches: int, checkpoint: bool) -> None:
    model = perceptron()
    x = torch.randn(4, 6, dtype=torch.float64)
    with SynchronousPipeline(chain(model, 4), microbatches, checkpoint=checkpoint) as pipeline:
        loss = pipeline(x).sum()
        loss.backward(retain_graph=True)
        first = gradients(model)
        loss.backward()
        assert_equal(gradients(model), first)
        with pytest.raises(RunError, match="what it needed is freed; give retain_graph=True"):
            loss.backward()


def test_parameters_that_were_changed_before_the_backward_are_noticed() -> None:
    model = perceptron()
    with SynchronousPipeline(chain(model, 4), 2) as pipeline:
        loss = pipeline(torch.randn(4, 6, dtype=torch.float64, requires_grad=True)).sum()
        with torch.no_grad():
            model[2].weight.mul_(2)
        with pytest.raises(WorkerError, match="modified by an inplace operation"):
            loss.backward()


# --- memory ----------------------------------------------------------------------------------


class Saved:
    """A tensor that the backward needs, while it does."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def counting(layer: nn.Module, live: weakref.WeakSet[Saved]) -> Any:
    def pack(tensor: Tensor) -> Saved:
        kept = Saved(tensor)
        live.add(kept)
        return kept

    def compute(stage: nn.Module, x: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept.tensor):
            return layer(x)

    return Stage({"layer": layer}, compute)


def test_what_a_microbatch_saved_is_freed_after_its_backward() -> None:
    live: weakref.WeakSet[Saved] = weakref.WeakSet()
    counts: list[int] = []

    def count(stage: nn.Module, x: Tensor) -> Tensor:
        return Meeting.apply(x, lambda: None, lambda: counts.append(len(live)))

    configuration = configured(
        [
            (["x"], ["y"], Stage({}, count)),
            (["y"], ["output"], counting(nn.Linear(3, 3), live)),
        ]
    )
    x = torch.randn(4, 3, requires_grad=True)
    for microbatches in (4, 1):
        with SynchronousPipeline(configuration, microbatches) as pipeline:
            output = pipeline(x)
            saved = len(live) // microbatches
            assert saved > 0
            output.sum().backward()
        assert len(live) == 0
        for done, found in enumerate(counts):
            assert found <= saved * (microbatches - 1 - done)
        counts.clear()
        assert output is not None


def test_nothing_is_saved_without_gradients_nor_after_a_call_is_dropped() -> None:
    live: weakref.WeakSet[Saved] = weakref.WeakSet()
    configuration = configured([(["x"], ["output"], counting(nn.Linear(3, 3), live))])
    with SynchronousPipeline(configuration, 2) as pipeline:
        with torch.no_grad():
            pipeline(torch.ones(4, 3))
        assert len(live) == 0
        output = pipeline(torch.ones(4, 3, requires_grad=True))
        assert len(live) > 0
        del output
        assert len(live) == 0


def test_recomputation_runs_all_but_the_last_microbatch_again() -> None:
    model = perceptron()
    seen: list[tuple[int, int]] = []
    configuration = met(model, lambda *place: seen.append(place), nothing)
    x = torch.randn(3, 6, dtype=torch.float64)
    with SynchronousPipeline(configuration, 3, checkpoint=True) as pipeline:
        output = pipeline(x, torch.arange(3))
        assert [row for stage, row in seen if stage == 1] == [0, 1, 2]
        output.sum().backward()
    for stage in (0, 1):
        assert [row for number, row in seen if number == stage] == [0, 1, 2, 1, 0]


@pytest.fixture(autouse=True)
def no_thread_stays() -> Iterator[None]:
    """Every test ends with the threads that there were."""
    yield
    for thread in threading.enumerate():
        if thread.name.startswith("stage "):
            thread.join(PATIENCE)
            assert not thread.is_alive()
