"""Running one unit alone."""

import time

import pytest
import torch
from torch import Tensor

from shardwright.autodiff.needed import needing_gradients, trained_parameters
from shardwright.costs.granularity import unit_graph, units
from shardwright.costs.measurement import Timing
from shardwright.errors import ProfileError
from shardwright.ir import Builder, IRGraph, Source
from shardwright.profiling.clock import REPEATS, computing_threads, median_seconds
from shardwright.profiling.measure import Settings, alone, measure
from tests.graphs import language_model

CPU = torch.device("cpu")
FAST = Settings(CPU, samples=1)


def timings(graph: IRGraph, depth: int | None = None) -> dict[str, Timing]:
    """The timing of each unit, by name."""
    wanted = needing_gradients(graph, trained_parameters(graph))
    return {
        unit.name: measure(unit_graph(graph, unit), wanted, FAST)
        for unit in units(graph, graph.nodes, depth=depth)
    }


def linear_after(*ops: str, rows: int = 64, width: int = 32) -> IRGraph:
    """Operators of one tensor between two linear layers, of which the first has no bias."""
    builder = Builder("graph")
    x = builder.input("x", (rows, width), "f32")
    x = builder.call("aten.linear.default", x, builder.param("w", torch.ones(width, width)))
    for op in ops:
        x = builder.call(op, x)
    return builder.finish(
        builder.call("aten.linear.default", x, builder.param("v", torch.ones(width, width)))
    )


def test_gradients_are_measured_where_the_model_needs_them() -> None:
    # The start of autograd, some ten microseconds that another load may double, is taken off: what
    # is left of a smaller product's backward is nothing, now and then.
    first, last = timings(linear_after(rows=512, width=256)).values()
    assert first.forward > 0
    assert first.backward == 0  # nobody wants the gradient of the input
    assert first.weight > 0
    assert last.backward > 0
    assert last.weight > 0


def test_bytes_of_a_forward_that_keeps_and_of_one_that_does_not() -> None:
    size = 64 * 32 * 4
    unit = timings(linear_after("aten.gelu.default"), depth=0)["graph"]
    assert unit.memory == 2 * size
    assert unit.memory_kept == 3 * size
    assert unit.memory_backward >= 2 * 32 * 32 * 4
    assert unit.memory_again >= unit.memory_kept


def test_what_no_gradient_goes_through_has_no_backward() -> None:
    builder = Builder("count")
    x = builder.input("x", (8,), "i64")
    (found,) = timings(builder.finish(builder.call("aten.add.Tensor", x, x))).values()
    assert (found.backward, found.weight, found.memory_backward, found.memory_again) == (0,) * 4
    assert found.memory == found.memory_kept == 64


def test_the_callers_modes_generators_and_threads_stay() -> None:
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    builder = Builder("random")
    x = builder.input("x", (8,), "f32")
    graph = builder.finish(builder.call("aten.dropout.default", x, 0.5, True))
    with torch.inference_mode():
        timings(graph)
        assert torch.is_inference_mode_enabled()
    assert torch.is_grad_enabled()
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_num_threads() == threads


def test_alone_computes_as_a_worker_does() -> None:
    with torch.autocast("cpu"), torch.inference_mode(), alone(Settings(CPU, threads=2)):
        assert torch.get_num_threads() == 2
        assert not torch.is_grad_enabled()
        assert not torch.is_inference_mode_enabled()
        assert not torch.is_autocast_enabled("cpu")


def test_a_failure_names_the_node_its_line_and_the_reason() -> None:
    builder = Builder("broken")
    x = builder.input("x", (4, 4), "f32")
    with builder.scope("head.solve", "tests.Solve"):
        made = builder.call("aten.linalg_cholesky.default", x)
    graph = builder.finish(made)
    graph.nodes[0].source = Source("model.py", 17)
    with pytest.raises(ProfileError) as caught:
        timings(graph)
    message = str(caught.value)
    assert message.startswith(
        "aten.linalg_cholesky.default in head.solve (tests.Solve) at model.py:17 cannot be measured"
    )
    assert "positive-definite" in message


def test_a_failure_in_a_backward_is_one_too() -> None:
    library = torch.library.Library("profiled", "FRAGMENT")
    try:
        library.define("stubborn(Tensor x) -> Tensor")
        library.impl("stubborn", lambda x: x.clone(), "CPU")

        def refuse(context: object, *gradients: Tensor) -> Tensor:
            raise RuntimeError("no gradient of this")

        torch.library.register_fake("profiled::stubborn", lambda x: x.clone(), lib=library)
        torch.library.register_autograd("profiled::stubborn", refuse, lib=library)
        allow(library)
        with pytest.raises(ProfileError, match=r"profiled.stubborn.default.*no gradient of this"):
            timings(linear_after("profiled.stubborn.default"))
    finally:
        library._destroy()


def allow(library: torch.library.Library) -> None:
    from shardwright.ir.operators import allow_namespace

    allow_namespace(library.ns)


def test_a_sample_of_something_short_is_many_runs() -> None:
    runs = []
    median_seconds(lambda: runs.append(1), 2, CPU)
    assert len(runs) == 3 + 2 * REPEATS


def test_the_median_of_samples() -> None:
    durations = iter([0, 0, 0.002, 0.001, 0.03, 0.003])
    found = median_seconds(lambda: time.sleep(next(durations)), 3, CPU)
    assert 0.003 <= found < 0.03


def test_threads_are_put_back_after_a_failure() -> None:
    before = torch.get_num_threads()
    with pytest.raises(ValueError), computing_threads(before + 1):  # noqa: PT011
        raise ValueError
    assert torch.get_num_threads() == before


def test_every_layer_of_a_model_can_be_measured() -> None:
    found = timings(language_model(layers=1))
    assert all(timing.forward > 0 for timing in found.values())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_on_cuda() -> None:
    graph = linear_after("aten.relu.default")
    wanted = needing_gradients(graph, trained_parameters(graph))
    (unit,) = units(graph, graph.nodes, depth=0)
    found = measure(unit_graph(graph, unit), wanted, Settings(torch.device("cuda", 0), samples=3))
    assert found.forward > 0
    assert found.weight > 0
    assert found.memory_kept > found.memory > 0
    assert found.memory_backward > 0
