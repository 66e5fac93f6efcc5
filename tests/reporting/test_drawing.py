"""What a drawing shows of a graph: boxes, folds, parts, edges."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import shardwright as sw
from shardwright.errors import DrawError
from shardwright.ir import Builder, IRGraph
from shardwright.reporting.dot import Box
from shardwright.reporting.drawing import LEGIBLE
from tests.graphs import language_model
from tests.ir.random_graphs import RandomGraph, random_graphs

NODES_A_BLOCK = 9


def shown(graph: IRGraph, **options: object) -> sw.Drawing:
    return sw.draw(graph, **options)  # type: ignore[arg-type]


def inside(frame: Box) -> list[Box]:
    return [box for box in frame if not box.items]


def titles(picture: sw.Drawing) -> list[str]:
    return [f"{box.title} ×{box.count}" if box.count > 1 else box.title for box in picture.boxes]


def cut(graph: IRGraph, *bounds: int) -> dict[int, int]:
    """A part for each node: how many of the bounds lie at or before it."""
    return {node.id: sum(i >= b for b in bounds) for i, node in enumerate(graph.nodes)}


def by_hand(*stages: int) -> sw.Partition:
    return sw.Partition("graph", "by hand", stages, ranks=(), replicas=(), shares=())


def chain(*ops: str) -> IRGraph:
    builder = Builder("chain")
    x = builder.input("x", (4, 4), "f32")
    for op in ops:
        x = builder.call(f"aten.{op}.default", x)
    return builder.finish(x)


# --- depth and folds ------------------------------------------------------------------------------


def test_equal_layers_are_one_box() -> None:
    picture = shown(language_model(layers=96), depth=1)
    assert titles(picture) == ["embedding", "mul", "Block ×96", "layer_norm", "linear"]
    block = picture.boxes[2]
    assert (block.path, len(block.nodes)) == ("layers.0 … 95", 96 * NODES_A_BLOCK)


def test_layers_of_two_parts_are_never_one() -> None:
    graph = language_model(layers=96)
    parts = cut(graph, 2 + 40 * NODES_A_BLOCK)
    picture = shown(graph, partition=parts, depth=1)
    assert titles(picture)[2:4] == ["Block ×40", "Block ×56"]
    assert [box.part for box in picture.boxes] == [0, 0, 0, 1, 1, 1]
    within = shown(graph, partition=cut(graph, 2 + 40 * NODES_A_BLOCK + 3), depth=1)
    assert titles(within)[2:5] == ["Block ×40", "Block", "Block"]
    assert [len(box.nodes) for box in within.boxes[3:5]] == [3, 6]


def test_a_stack_is_opened_once() -> None:
    picture = shown(language_model(layers=96), depth=2)
    (stack,) = picture.frames
    assert (stack.title, stack.count, len(inside(stack))) == ("Block", 96, NODES_A_BLOCK)
    assert all(len(box.nodes) == 96 for box in inside(stack))


def test_without_folding_every_layer_is_drawn() -> None:
    picture = shown(language_model(layers=6), fold=False, depth=2)
    assert [frame.path for frame in picture.frames] == [f"layers.{i}" for i in range(6)]
    assert all(len(box.nodes) == 1 for box in picture.boxes)


def test_layers_that_differ_are_not_folded() -> None:
    builder = Builder("different")
    x = builder.input("x", (4, 4), "f32")
    for i, operator in enumerate(("relu", "relu", "sigmoid", "relu", "relu")):
        with builder.scope(f"h.{i}", "Layer"):
            y = builder.call(f"aten.{operator}.default", x)
            y = builder.call("aten.tanh.default", y)
            x = builder.call("aten.add.Tensor", x if i < 4 else y, y)
    picture = shown(builder.finish(x), depth=1)
    assert titles(picture) == ["Layer ×2", "Layer", "Layer", "Layer"]


def test_depth_0_is_a_box_for_each_part() -> None:
    graph = language_model(layers=4)
    assert titles(shown(graph, depth=0)) == ["language_model"]
    parts = cut(graph, 10, 20)
    assert titles(shown(graph, depth=0, partition=parts)) == ["part 0", "part 1", "part 2"]
    stages = by_hand(*parts.values())
    assert titles(shown(graph, depth=0, partition=stages)) == ["stage 0", "stage 1", "stage 2"]


def test_blocks_without_modules_are_found_by_what_they_do() -> None:
    graph = chain("exp", *("relu", "tanh", "sigmoid") * 40, "exp")
    assert titles(shown(graph, depth=1)) == ["exp", "3 operators ×40", "exp"]
    assert titles(shown(graph)) == ["exp", "relu", "tanh", "sigmoid", "exp"]
    assert titles(shown(chain("relu", "relu"))) == ["relu", "relu"]
    assert titles(shown(chain(*["relu"] * 9))) == ["relu ×9"]


@pytest.mark.parametrize("layers", [1, 6, 96])
@pytest.mark.parametrize("stages", [1, 2, 4])
def test_a_picture_stays_legible(layers: int, stages: int) -> None:
    graph = language_model(layers=layers)
    size = len(graph.nodes) / stages
    picture = shown(graph, partition=cut(graph, *(round(i * size) for i in range(1, stages))))
    assert stages <= len(picture.boxes) <= LEGIBLE


def test_the_update_of_a_step_is_one_box(step_graph: IRGraph) -> None:
    picture = shown(step_graph, depth=9)
    assert titles(picture)[-2:] == ["Backward", "update"]
    assert sum(len(box.nodes) for box in picture.boxes) == len(step_graph.nodes)


@pytest.fixture
def step_graph() -> IRGraph:
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(4)))
    optimizer = torch.optim.AdamW(model.parameters())

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x), y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss

    return sw.compile_ir(step, torch.ones(4, 8), torch.ones(4, 8))


def test_an_empty_graph_is_drawn() -> None:
    builder = Builder("")
    x = builder.input("x", (2,), "f32")
    picture = shown(builder.finish(x))
    assert picture.boxes == []
    assert [(edge.source, edge.target, edge.sizes) for edge in picture.edges] == [
        ("in0", "out0", (8,))
    ]


# --- parts ----------------------------------------------------------------------------------------


def test_parts_in_order_are_framed_and_others_only_coloured() -> None:
    graph = chain("relu", "tanh", "exp", "neg")
    along, across = cut(graph, 2), {node.id: i % 2 for i, node in enumerate(graph.nodes)}
    framed = shown(graph, partition=along)
    assert [(frame.title, frame.is_module) for frame in framed.frames] == [
        ("part 0", False),
        ("part 1", False),
    ]
    assert shown(graph, partition=across).frames == []
    assert [box.part for box in shown(graph, partition=across).boxes] == [0, 1, 0, 1]


def test_parts_that_alternate_stand_together_where_data_flows_on() -> None:
    builder = Builder("branches")
    x = builder.input("x", (2,), "f32")
    left = right = x
    for _ in range(3):
        left = builder.call("aten.relu.default", left)
        right = builder.call("aten.tanh.default", right)
    graph = builder.finish(builder.call("aten.add.Tensor", left, right))
    picture = shown(graph, partition={node.id: i % 2 for i, node in enumerate(graph.nodes[:6])})
    assert [frame.title for frame in picture.frames] == ["part 0", "part 1"]
    assert [box.part for box in picture.boxes] == [0, 0, 0, 1, 1, 1, None]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"partition": {10**6: 0}}, "partition: the graph 'chain' has no node 1000000"),
        ({"profile": {10**6: 1.0}}, "profile: the graph 'chain' has no node 1000000"),
        ({"depth": -1}, "depth=-1"),
        ({"depth": 1.5}, "depth=1.5"),
        ({"path": "picture.gif"}, "a graph cannot be drawn as 'picture.gif'"),
    ],
)
def test_what_cannot_be_drawn(options: dict[str, object], message: str) -> None:
    with pytest.raises(DrawError, match=message):
        shown(chain("relu"), **options)


@pytest.mark.parametrize("time", [-1.0, math.nan, math.inf])
def test_times_are_numbers_from_0(time: float) -> None:
    graph = chain("relu")
    with pytest.raises(DrawError, match="expected milliseconds"):
        shown(graph, profile={graph.nodes[0].id: time})


def test_stages_of_another_graph_are_refused() -> None:
    stages = by_hand(0, 1)
    assert shown(chain("relu", "tanh"), partition=stages).parts == {0: "stage 0", 1: "stage 1"}
    with pytest.raises(DrawError, match="has 2 stages' numbers, the graph 'chain' has 1 forward"):
        shown(chain("relu"), partition=stages)


# --- laws -----------------------------------------------------------------------------------------


MODELS = [language_model(layers=layers, tied=layers == 3) for layers in (0, 1, 3, 7)]
LAW = settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@st.composite
def drawn_graphs(draw: st.DrawFn) -> tuple[IRGraph, dict[str, object]]:
    """A graph of either kind, with parts, times, and a way to draw it."""
    found: IRGraph | RandomGraph = draw(st.sampled_from(MODELS) | random_graphs())
    graph = found.graph if isinstance(found, RandomGraph) else found
    ids = [node.id for node in graph.nodes]
    length, scale = draw(st.integers(1, 30)), draw(st.floats(0, 1e3))
    numbers = draw(
        st.sampled_from(
            [
                None,
                {node_id: i // length for i, node_id in enumerate(ids)},
                {node_id: i % length for i, node_id in enumerate(ids)},
                {node_id: i // length for i, node_id in enumerate(ids) if i % 7},
            ]
        )
    )
    options: dict[str, object] = {
        "partition": numbers,
        "profile": {node_id: scale * i for i, node_id in enumerate(ids) if i % length},
        "fold": draw(st.booleans()),
        "depth": draw(st.none() | st.integers(0, 4)),
    }
    return graph, options


@LAW
@given(drawn_graphs())
def test_every_node_is_in_one_box_of_its_part(drawn: tuple[IRGraph, dict[str, object]]) -> None:
    graph, options = drawn
    boxes = shown(graph, **options).boxes
    assert sorted(n.id for box in boxes for n in box.nodes) == sorted(n.id for n in graph.nodes)
    parts = options["partition"] or {}
    assert isinstance(parts, dict)
    for box in boxes:
        assert {parts.get(node.id) for node in box.nodes} == {box.part}


@LAW
@given(drawn_graphs())
def test_bytes_and_times_add_up(drawn: tuple[IRGraph, dict[str, object]]) -> None:
    graph, options = drawn
    picture = shown(graph, **options)
    times = options["profile"]
    assert isinstance(times, dict)
    known = [box.milliseconds for box in picture.boxes if box.milliseconds is not None]
    assert sum(known) == pytest.approx(sum(times.values()))
    box_of = {node.id: box.name for box in picture.boxes for node in box.nodes}
    expected: dict[tuple[str, str], set[int]] = {}
    for value_id, source, target in flows(graph, box_of):
        if source != target:
            expected.setdefault((source, target), set()).add(value_id)
    found = {(edge.source, edge.target): sum(edge.sizes) for edge in picture.edges}
    assert found == {
        pair: sum(graph.values[v].nbytes for v in values) for pair, values in expected.items()
    }


def flows(graph: IRGraph, box_of: dict[int, str]) -> Iterator[tuple[int, str, str]]:
    """Each value with where it is made and where it is read."""
    names = {value_id: f"in{i}" for i, value_id in enumerate(graph.inputs)}
    for value in graph.values.values():
        source = names.get(value.id)
        if value.producer is not None:
            source = box_of[value.producer]
        targets = [box_of[user] for user in value.users]
        targets += [f"out{i}" for i, given in enumerate(graph.outputs) if given == value.id]
        targets += ["updates"] if value.id in graph.updates.values() else []
        if source is not None:
            yield from ((value.id, source, target) for target in targets)


@LAW
@given(drawn_graphs())
def test_boxes_of_a_frame_are_of_its_part(drawn: tuple[IRGraph, dict[str, object]]) -> None:
    graph, options = drawn
    for frame in shown(graph, **options).frames:
        assert {box.part for box in inside(frame)} == {frame.part}


@LAW
@given(drawn_graphs())
def test_only_folds_lead_back(drawn: tuple[IRGraph, dict[str, object]]) -> None:
    graph, options = drawn
    picture = shown(graph, **{**options, "fold": False, "partition": None})
    assert not any(edge.leads_back for edge in picture.edges)


def test_a_layer_leads_back_to_the_next() -> None:
    graph = language_model(layers=5)
    picture = shown(graph, depth=2)
    (back,) = [edge for edge in picture.edges if edge.leads_back and len(edge.sizes) == 4][:1]
    order = [box.name for box in picture.boxes]
    assert order.index(back.source) > order.index(back.target)
    assert set(back.sizes) == {2 * 3 * 8 * 8}


def test_ends_are_named() -> None:
    picture = shown(language_model(layers=3), depth=1)
    assert [end.title for end in picture.ends] == ["tokens", "output"]
