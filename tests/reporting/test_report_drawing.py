"""Pictures by plans and profiles."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import shardwright as sw
from shardwright.clusters import CPU_CORE
from shardwright.ir import IRGraph
from shardwright.reporting.drawing import node_times
from tests.graphs import language_model

COSTS = sw.Analytic(CPU_CORE)


def named_parts(drawing: sw.Drawing) -> list[str]:
    return list(drawing.parts.values())


def step_graph() -> IRGraph:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(6)))
    optimizer = torch.optim.AdamW(model.parameters())

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    return sw.compile_ir(step, torch.ones(4, 8), torch.ones(4, 8))


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"devices": 2}, ["stage 0 on d0", "stage 1 on d1"]),
        ({"devices": 2, "policy": "metis"}, ["stage 0 on d0", "stage 1 on d1"]),
        ({"devices": 2, "policy": "tensor"}, ["d0 d1"]),
        (
            {"mesh": {"pipeline": 2, "tensor": 2}},
            ["stage 0 on d0 d1", "stage 1 on d2 d3"],
        ),
    ],
)
def test_a_plan_colours_its_stages(options: dict[str, Any], names: list[str]) -> None:
    graph = language_model(layers=4)
    drawing = sw.draw(graph, plan=sw.plan(graph, **options), depth=1)
    assert named_parts(drawing) == names
    assert all(box.part is not None for box in drawing.boxes)


def test_a_step_is_coloured_by_the_stages_of_its_forward() -> None:
    graph = step_graph()
    plan = sw.plan(graph, mesh={"pipeline": 2}, microbatches=2, schedule="interleaved", chunks=2)
    drawing = sw.draw(graph, plan=plan, profile=COSTS)
    assert named_parts(drawing) == [f"stage {i} on d{i % 2}" for i in range(4)]
    boxes = drawing.boxes
    backward, update = boxes[-2:]
    staged = [box for box in boxes if box.part is not None]
    assert sum(len(box.nodes) for box in staged) == len(plan.nodes)
    assert all(box.milliseconds is not None for box in staged)
    assert (backward.title, update.title) == ("Backward", "adamw_step")
    assert backward.part is update.part is backward.milliseconds is None


def test_fused_products_are_drawn_as_they_are_taken_apart() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(8, 24)
            self.out = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = (
                part.view(2, 3, 2, 4).transpose(1, 2) for part in self.qkv(x).split(8, dim=-1)
            )
            mixed = nn.functional.scaled_dot_product_attention(q, k, v)
            return self.out(mixed.transpose(1, 2).reshape(2, 3, 8))

    graph = sw.capture(Attention().eval(), (torch.randn(2, 3, 8),))
    plan = sw.plan(graph, devices=2, policy="tensor")
    assert plan.unfused
    drawn = [box.title for box in sw.draw(graph, plan=plan, fold=False, depth=9).boxes]
    assert drawn.count("linear") == 4
    assert "split" not in drawn


def test_a_profile_gives_the_times_of_the_graph() -> None:
    graph = sw.capture(nn.Sequential(nn.Linear(8, 8), nn.ReLU()), (torch.ones(2, 8),))
    profile = sw.profile(graph, n_iter=1, cache=False)
    drawing = sw.draw(graph, profile=profile, caption="measured")
    times = [box.milliseconds for box in drawing.boxes]
    assert sum(filter(None, times)) == pytest.approx(profile.forward_time)
    assert ">measured<" in str(drawing)


def test_times_of_a_step_are_of_forward_and_backward() -> None:
    graph = step_graph()
    times = node_times(graph, COSTS)
    first = next(node for node in graph.nodes if node.op == "aten.linear.default")
    cost = COSTS.node(graph, first)
    assert times[first.id] == pytest.approx(1e3 * cost.total)
    assert cost.total > cost.forward


def test_a_partition_colours_its_stages() -> None:
    graph = language_model(layers=4)
    partition = sw.metis_partition(graph, 2, seed=1)
    assert named_parts(sw.draw(graph, partition=partition)) == ["stage 0", "stage 1"]


def test_layers_are_drawn_as_their_graph() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4))).eval()
    layers = sw.build_graph(model, torch.ones(2, 8))
    assert str(sw.draw(layers)) == str(sw.draw(layers.graph))
    found = sw.metis_partition(layers, 2)
    assert str(sw.draw(found)) == str(sw.draw(found.graph, partition=found.partition))
    assert named_parts(sw.draw(found)) == ["stage 0", "stage 1"]


def test_what_does_not_fit_is_refused() -> None:
    graph, other = language_model(layers=2), language_model(layers=3)
    plan = sw.plan(graph, devices=2)
    with pytest.raises(sw.PlanError, match="plan again"):
        sw.draw(other, plan=plan)
    with pytest.raises(sw.DrawError, match="give either a plan or a partition"):
        sw.draw(graph, plan=plan, partition={})
    with pytest.raises(sw.DrawError, match=r"draw a plan with sw\.draw"):
        sw.draw(graph, partition=plan)  # type: ignore[arg-type]
    with pytest.raises(sw.DrawError, match=r"drawn with the graph it is of: sw\.draw\(graph, plan"):
        sw.draw(plan)  # type: ignore[arg-type]
    with pytest.raises(sw.DrawError, match="graph is a int; give what capture"):
        sw.draw(3)  # type: ignore[arg-type]
