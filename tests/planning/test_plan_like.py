"""None"""

import pytest
import torch
from torch import nn

from shardwright.building import build
from shardwright.errors import PlanError
from shardwright.planner import plan
from shardwright.planning import plan_beside
from shardwright.planning.assemble import step_of
from shardwright.planning.unfuse import unfuse
from shardwright.runtime.contents import shared_constants
from shardwright.tracing import compile_ir


class Net(nn.Module):
    """Blocks with a fused product, between an embedding and a head that is tied to it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 16)
        self.up = nn.ModuleList(nn.Linear(16, 96) for _ in range(4))
        self.down = nn.ModuleList(nn.Linear(32, 16) for _ in range(4))
        self.head = nn.Linear(16, 20, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for up, down in zip(self.up, self.down, strict=True):
            a, b, c = up(x).split(32, dim=-1)
            x = x + down(a * b.tanh() + c)
        return self.head(x)


def captured(batch: int = 8):
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    def evaluate(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (model(x).argmax(-1) == y).float().mean()

    x = torch.zeros(batch, dtype=torch.int64)
    return compile_ir(step, x, x), compile_ir(evaluate, x, x)


def where(graph, made) -> dict[str, set]:
    """The slots, and the split of each axis, of the nodes that read each stored value."""
    found: dict[str, set] = {}
    for node, index in zip(graph.nodes, made.nodes, strict=False):
        assignment = made.assignments[index]
        for value_id in node.inputs:
            for name in graph.values[value_id].names[:1]:
                found.setdefault(name, set()).add((assignment.mesh, assignment.splits))
    return found


@pytest.mark.parametrize(
    "mesh",
    [
        {"pipeline": 2},
        {"pipeline": 4},
        {"tensor": 2},
        {"data": 2},
        {"pipeline": 2, "tensor": 2},
        {"pipeline": 2, "data": 2},
        {"pipeline": 1, "data": 2},
    ],
    ids=str,
)
def test_parameters_are_read_where_the_step_has_them(mesh: dict[str, int]) -> None:
    step, evaluation = captured()
    made = plan(step, mesh=mesh, microbatches=2)
    beside = plan_beside(evaluation, step, made)
    there = where(step_of(step, made).graph, made)
    here = where(unfuse(evaluation, beside.unfused), beside)
    assert beside.devices == made.devices
    assert set(here) == {name for name, value in there.items() if "." in name}
    assert all(here[name] <= there[name] for name in here)


def test_stages_of_a_rank_that_has_several() -> None:
    step, evaluation = captured()
    made = plan(step, mesh={"pipeline": 2}, microbatches=4, schedule="interleaved", chunks=2)
    beside = plan_beside(evaluation, step, made)
    here, there = where(evaluation, beside), where(step_of(step, made).graph, made)
    assert all(here[name] <= there[name] for name in here)
    assert len(beside.assignments) == 2


@pytest.mark.parametrize(("schedule", "chunks"), [("zb-v", 2), ("interleaved", 4)])
@pytest.mark.parametrize("inner", [{}, {"tensor": 2}], ids=str)
def test_a_tied_head_where_the_pipeline_comes_back(
    schedule: str, chunks: int, inner: dict[str, int]
) -> None:
    """The head's stage is on a rank that has the embedding, not where its input comes from."""
    step, evaluation = captured()
    mesh = {"pipeline": 2, **inner}
    made = plan(step, mesh=mesh, microbatches=4, schedule=schedule, chunks=chunks)
    beside = plan_beside(evaluation, step, made)
    shared_constants(build(evaluation, beside), build(step, made))


def test_a_plan_of_no_training_step() -> None:
    step, evaluation = captured()
    with pytest.raises(PlanError, match="of no training step"):
        plan_beside(step, evaluation, plan(evaluation, 2))
    with pytest.raises(PlanError, match="was made for the graph"):
        plan_beside(evaluation, step, plan(evaluation, 2))


def test_a_graph_of_which_an_axis_splits_nothing() -> None:
    """A step is done whole by each slot; of an evaluation all but one would be idle."""
    step, _ = captured()
    single, evaluation = captured(batch=1)
    made = plan(step, mesh={"data": 2})
    beside = plan_beside(single, step, made)
    assert all(not any(found.splits) for found in beside.assignments)
    shared_constants(build(single, beside), build(step, made))
    with pytest.raises(
        PlanError, match=r"nothing in .* x i64\[1\].* in 2 along .* give batches of 2 samples"
    ):
        plan_beside(evaluation, step, made)


@pytest.mark.parametrize("mesh", [{"pipeline": 2}, {"tensor": 2}, {"data": 2}], ids=str)
def test_a_step_for_another_batch_is_where_the_step_is(mesh: dict[str, int]) -> None:
    (step, _), (other, _) = captured(), captured(batch=6)
    made = plan(step, mesh=mesh, microbatches=2)
    beside = plan_beside(other, step, made, microbatches=3)
    assert beside.training is not None
    assert made.training is not None
    assert beside.training.microbatches == 3
    assert beside.training.stages == made.training.stages
    there = where(step_of(step, made).graph, made)
    assert where(step_of(other, beside).graph, beside) == there
