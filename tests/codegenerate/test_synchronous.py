"""`SynchronousPipeline`: outputs and gradients, held against the model that was cut."""

from __future__ import annotations

import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from benchmarks.models import gpt
from shardwright.codegenerate import codegen
from shardwright.codegenerate.synchronous import SynchronousPipeline
from shardwright.errors import InputError
from shardwright.planner import plan
from shardwright.tracing import capture
from tests.codegenerate.staged import (
    PATIENCE,
    Configuration,
    Meeting,
    Stage,
    assert_close,
    assert_equal,
    chain,
    configured,
    gradients,
    met,
    nothing,
    perceptron,
)
from tests.codegenerate.written import imported


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


# --- order --------------------------------------------------------------------------------


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


# --- `SynchronousPipeline` over stages that `codegen` wrote ---------------------------------------


def configuration_of(model: torch.nn.Module, ids: torch.Tensor, path: Path) -> Configuration:
    graph = capture(model, (ids,))
    codegen(plan(graph, devices=2), path, graph=graph)
    return imported(path).create_pipeline_configuration(model, debug=True)


def test_generated_stages_train_the_model(tmp_path: Path) -> None:
    model, (ids,) = gpt(2, batch=6, length=8, width=16)
    model.double()
    sum(model(part).square().sum() for part in ids.split(2)).backward()
    wanted = gradients(model)
    with SynchronousPipeline(configuration_of(model, ids[:2], tmp_path / "s.py"), 3) as pipeline:
        assert pipeline.state_dict().keys() == model.state_dict().keys()
        pipeline(ids=ids).square().sum().backward()
        assert_close(gradients(model), wanted)
        with pytest.raises(InputError, match=r"captured with \[2, 8\].*; give 6 rows in 3 micro"):
            pipeline(ids[:5])


# --- what a call of `SynchronousPipeline` keeps for its backward, and for how long ----------------


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
