from __future__ import annotations

import traceback
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.errors import RunError, WorkerError
from shardwright.pipeline import Pipeline
from shardwright.runtime import Runner
from tests.engine.test_slot_engine import counting
from tests.runtime import operators
from tests.runtime.sketch import (
    Sketch,
    chain,
    chain_result,
    every_collective,
    every_collective_result,
    identity,
)


@pytest.mark.parametrize("slots", [1, 2, 3, 4])
def test_a_chain(slots: int) -> None:
    x = torch.randn(3, 4)
    with Runner(chain(slots), in_process=True) as runner:
        assert torch.equal(runner(x), chain_result(x, slots))
        assert torch.equal(runner(x=-x), chain_result(-x, slots))


@pytest.mark.parametrize("slots", [2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bfloat16])
def test_every_collective(slots: int, dtype: torch.dtype) -> None:
    size = 2 * slots + 1
    x = (torch.arange(size * size) % 7).reshape(size, size).to(dtype)
    names = {torch.float32: "f32", torch.int64: "i64", torch.bfloat16: "bf16"}
    with Runner(every_collective(slots, names[dtype]), in_process=True) as runner:
        found = runner(x)
    assert all(map(torch.equal, found.values(), every_collective_result(x, slots)))


@settings(max_examples=30, deadline=None)  # The first proof imports much of torch.
@given(
    slots=st.integers(1, 4),
    calls=st.integers(1, 6),
    in_flight=st.integers(1, 5),
    data=st.data(),
)
def test_any_pipeline_streams_any_calls(slots: int, calls: int, in_flight: int, data) -> None:
    """Supertasks on random slots, each adding two earlier tensors wherever they are."""
    sketch = Sketch(slots)
    homes = {sketch.input(f"x{i}", (2,), f"d{i}"): f"d{i}" for i in range(slots)}
    places: dict[tuple[str, str], str] = {(name, home): name for name, home in homes.items()}
    recipe: list[tuple[str, str]] = []

    def on(tensor: str, device: str) -> str:
        if (tensor, device) not in places:
            places[tensor, device] = sketch.send(tensor, homes[tensor], device)
        return places[tensor, device]

    for k in range(data.draw(st.integers(1, 6), label="supertasks")):
        device = f"d{k if k < slots else data.draw(st.integers(0, slots - 1), label='slot')}"
        a, b = (data.draw(st.sampled_from(sorted(homes)), label="operand") for _ in range(2))
        recipe.append((a, b))
        sketch.fx(f"t{k}", device, [on(a, device), on(b, device)], [f"y{k}"], _weighted_sum)
        homes[f"y{k}"] = device
        places[f"y{k}", device] = f"y{k}"
    for i in range(slots):
        sketch.fx(f"end{i}", f"d{i}", [f"x{i}"], [f"z{i}"], identity)
    outputs = [*(f"y{k}" for k in range(len(recipe))), *(f"z{i}" for i in range(slots))]
    pipeline = sketch.finish(outputs)

    def expected(xs: list[torch.Tensor]) -> list[torch.Tensor]:
        known = {f"x{i}": x for i, x in enumerate(xs)}
        for k, (a, b) in enumerate(recipe):
            known[f"y{k}"] = known[a] + 2 * known[b]
        return [*(known[f"y{k}"] for k in range(len(recipe))), *xs]

    stream = [
        tuple(torch.full((2,), float(10 * c + i)) for i in range(slots)) for c in range(calls)
    ]
    with Runner(pipeline, in_process=True, in_flight=in_flight) as runner:
        for xs, found in zip(stream, runner.map(stream), strict=True):
            assert all(map(torch.equal, found.values(), expected(list(xs))))


def _weighted_sum(builder, a, b):
    return builder.call("aten.add.Tensor", a, b, alpha=2)


def test_state_is_kept_between_calls() -> None:
    with Runner(counting(), in_process=True) as runner:
        stream = [torch.zeros(1) for _ in range(5)]
        assert [y.item() for y in runner.map(stream)] == [0, 1, 2, 3, 4]


def test_state_is_safe_from_the_caller() -> None:
    """The new state is what the caller gave; writing to it later changes nothing."""
    sketch = Sketch(1)
    sketch.input("x", (1,))
    sketch.constant("last", torch.zeros(1))
    sketch.fx(
        "d0.0",
        "d0",
        ["x", "last"],
        ["y", "new"],
        lambda b, x, last: [
            b.call("aten.clone.default", last),
            b.call("aten.view.default", x, [1]),
        ],
    )
    with Runner(sketch.finish(["y"], replaces={"new": "last"}), in_process=True) as runner:
        x = torch.ones(1)
        runner(x)
        x.fill_(9)
        assert runner(x).item() == 1


def failing() -> Pipeline:
    return chain(2, op="runtime_tests.refuse_nan.default")


def test_an_exception_is_that_of_a_worker() -> None:
    bad = torch.full((3, 4), float("nan"))
    with Runner(failing(), in_process=True, modules=[operators.__name__]) as runner:
        with pytest.raises(WorkerError, match="ArithmeticError: there is a NaN") as caught:
            runner(bad)
        text = "".join(traceback.format_exception(caught.value))
        assert "in refuse_nan" in text
        assert (caught.value.rank, caught.value.task) == (0, "d0.0")
        good = torch.zeros(3, 4)
        assert torch.equal(runner(good), good), "the runner goes on"


def test_calls_under_way_end_with_the_failure_of_one() -> None:
    bad, good = torch.full((3, 4), float("nan")), torch.zeros(3, 4)
    with Runner(failing(), in_process=True, modules=[operators.__name__]) as runner:
        futures = [runner.submit(x) for x in (bad, good)]
        for future in futures:
            with pytest.raises(WorkerError, match="ArithmeticError"):
                future.result()


def test_the_number_of_threads_is_the_callers_again() -> None:
    before = torch.get_num_threads()
    with Runner(chain(2), in_process=True, threads=before + 1) as runner:
        runner(torch.zeros(3, 4))
    assert torch.get_num_threads() == before


@pytest.mark.parametrize("in_process", [True, False])
@pytest.mark.parametrize(
    "numbers",
    [{"timeout": 0}, {"timeout": -1.0}, {"timeout": float("nan")}, {"threads": 0}],
    ids=str,
)
def test_numbers_with_which_nothing_can_run(numbers: dict[str, Any], in_process: bool) -> None:
    (name,) = numbers
    with pytest.raises(RunError, match=rf"^{name}={numbers[name]}; "):
        Runner(chain(2), in_process=in_process, **numbers)


def test_events() -> None:
    with Runner(chain(2), in_process=True, trace=True) as runner:
        list(runner.map([torch.zeros(3, 4)] * 3))
        events = runner.timeline.events
    tasks = ["d0.0", "send.y0@d1", "recv.y0@d1", "d1.0"]
    assert sorted((e.call, e.task) for e in events) == sorted(
        (call, task) for call in range(3) for task in tasks
    )
    assert all(event.start <= event.end for event in events)
