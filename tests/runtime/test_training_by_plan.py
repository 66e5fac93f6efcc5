"""Training by a plan, whatever splits it has: losses and evaluations are those of eager."""

import random
from functools import cache

import msgspec
import pytest
import torch
from torch import nn

from shardwright.clusters import Cluster, DeviceModel
from shardwright.errors import PlanError
from shardwright.ir import IRGraph
from shardwright.ops.catalog import dimop_of
from shardwright.planner import plan
from shardwright.planning import Plan, Split
from shardwright.planning.assemble import step_of
from shardwright.training import TrainResult, train
from shardwright.training.data import Loading
from shardwright.training.program import TrainingProgram
from tests.runtime.programs import Trained, gpt, perceptron, rows, tokens, trained


def images() -> Trained:
    """Convolutions with batch norm, which is another operator in eval mode."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Unflatten(1, (1, 4, 4)),
        nn.Conv2d(1, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 6, 3, padding=1, bias=False),
        nn.BatchNorm2d(6),
        nn.Flatten(),
        nn.Linear(96, 4),
    )
    return trained(model, torch.optim.SGD(model.parameters(), lr=0.05))


PROGRAMS = {
    "perceptron": (lambda: perceptron(0.0), rows),
    "gpt": (gpt, tokens),
    "images": (images, rows),
}


@cache
def captured(kind: str, microbatches: int) -> IRGraph:
    make, data = PROGRAMS[kind]
    program = make()
    batch = Loading(data(1), seed=0).first()
    return TrainingProgram(program.step, batch, microbatches=microbatches, seed=0).graph


def resplit(graph: IRGraph, made: Plan, seed: int) -> Plan:
    """The plan with other splits, drawn at random of those that annotations allow."""
    draws = random.Random(seed)
    step = step_of(graph, made)
    table: dict[object, int] = {}
    nodes = []
    for node, index in zip(step.graph.nodes, made.nodes, strict=False):
        assignment = made.assignments[index]
        bound = dimop_of(step.graph, node)
        splits = []
        for axis, size, split in zip(
            assignment.mesh.axes, assignment.mesh.sizes, assignment.splits, strict=True
        ):
            if axis == "tensor":
                names = [] if bound is None else bound.identifiers
                fits = [name for name in names if bound.length(name) >= size]
                identifier = draws.choice([None, *fits])
                split = None if identifier is None else Split(identifier)
            splits.append(split)
        taken = [split.identifier for split in splits if isinstance(split, Split)]
        if len(set(taken)) < len(taken):
            splits[assignment.mesh.axes.index("tensor")] = None
        other = msgspec.structs.replace(assignment, splits=tuple(splits))
        nodes.append(table.setdefault(other, len(table)))
    return msgspec.structs.replace(made, assignments=tuple(table), nodes=tuple(nodes))


def run(kind: str, made: Plan) -> tuple[TrainResult, list[float], dict[str, float]]:
    """A run of three steps by a plan; the losses of eager, and its evaluation afterwards."""
    make, data = PROGRAMS[kind]
    program, reference = make(), make()
    eval_data = [*data(2, seed=5), tuple(item[:5] for item in data(1, seed=6)[0])]
    result = train(
        program.step,
        data(3),
        plan=made,
        epochs=1,
        in_process=True,
        quiet=True,
        evaluate=program.evaluate,
        eval_data=eval_data,
    )
    expected = reference.loop(data(3))
    reference.model.eval()
    reference.model.load_state_dict(result.state_dict())
    with torch.no_grad():
        found = [(reference.evaluate(*batch), len(batch[0])) for batch in eval_data]
    means = {name: sum(r[name].item() * n for r, n in found) / 21 for name in found[0][0]}
    return result, expected, means


def check(kind: str, made: Plan) -> None:
    result, losses, evaluation = run(kind, made)
    assert result.plan == made
    assert result.losses == pytest.approx(losses, rel=2e-4)
    assert next(reversed(result.evaluations.values())) == pytest.approx(evaluation, rel=1e-4)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("kind", ["perceptron", "gpt"])
@pytest.mark.parametrize("mesh", [{"tensor": 2}, {"pipeline": 2, "data": 2, "tensor": 2}], ids=str)
def test_splits_drawn_at_random(kind: str, mesh: dict[str, int], seed: int) -> None:
    microbatches = 2 if "pipeline" in mesh else 1
    graph = captured(kind, microbatches)
    check(kind, resplit(graph, plan(graph, mesh=mesh, microbatches=microbatches), seed))


@pytest.mark.parametrize(
    "mesh", [{"tensor": 2}, {"pipeline": 2, "tensor": 2}, {"data": 2}], ids=str
)
def test_batch_norm_is_read_as_the_step_holds_it(mesh: dict[str, int]) -> None:
    made = plan(captured("images", 1), mesh=mesh)
    result, _, evaluation = run("images", made)
    assert next(reversed(result.evaluations.values())) == pytest.approx(evaluation, rel=1e-4)


def test_options_beside_a_plan_are_refused() -> None:
    program = perceptron()
    made = plan(captured("perceptron", 1), 2)
    with pytest.raises(PlanError, match="settles what mesh, schedule would"):
        train(program.step, rows(1), plan=made, steps=1, mesh={"data": 2}, schedule="gpipe")


def test_a_plan_is_good_for_any_seed_of_dropout() -> None:
    program = perceptron(0.3)
    graph = TrainingProgram(
        program.step, Loading(rows(1), seed=0).first(), microbatches=1, seed=0
    ).graph
    made = plan(graph, 2)
    found = [
        train(perceptron(0.3).step, rows(2), epochs=1, in_process=True, quiet=True, seed=1, **how)
        for how in ({"plan": made}, {"devices": 2})
    ]
    assert found[0].losses == found[1].losses


def test_a_plan_of_another_step_is_refused() -> None:
    with pytest.raises(PlanError, match=r"inputs were .*i64\[8, 6\].*, here they are x f32"):
        train(perceptron().step, rows(1), plan=plan(captured("gpt", 1), 2), steps=1)


def test_an_evaluation_of_one_sample() -> None:
    program, sample = perceptron(), tuple(item[:1] for item in rows(1)[0])
    result = train(
        program.step,
        rows(1),
        steps=1,
        mesh={"data": 2},
        in_process=True,
        quiet=True,
        evaluate=program.evaluate,
        eval_data=[sample],
    )
    with torch.no_grad():
        expected = program.evaluate(*sample)
    assert result.evaluations[1] == pytest.approx({k: v.item() for k, v in expected.items()})


@pytest.mark.parametrize("kind", ["gpt", "images"])
def test_a_plan_that_is_searched_for_takes_the_whole_batch(kind: str) -> None:
    """As many microbatches as make a step of it fastest; one where more would change results."""
    make, data = PROGRAMS[kind]
    program, reference = make(), make()
    slow = DeviceModel("slow", "cpu", memory=10**9, flops=1e6, bandwidth=1e6, overhead=1e-3)
    cluster = Cluster.of(2, device=slow)
    result = train(
        program.step, data(2), devices=cluster, policy="auto", epochs=1, in_process=True, quiet=True
    )
    count = result.plan.training.microbatches
    assert count == 1 if kind == "images" else 8 % count == 0
    assert len(result.plan.devices) == 2
    if kind == "gpt":
        assert result.losses == pytest.approx(reference.loop(data(2)), rel=1e-4)
    asked = plan(captured(kind, 1), cluster, "auto", microbatches=1)
    assert result.plan.prediction.step_time <= asked.prediction.step_time


def test_a_search_that_finds_nothing_says_what_lacks() -> None:
    tiny = DeviceModel("tiny", "cpu", memory=1000, flops=1e9, bandwidth=1e9, overhead=1e-6)
    with pytest.raises(PlanError, match=r"bytes|MB"):
        train(
            perceptron().step,
            rows(1),
            devices=Cluster.of(2, device=tiny),
            policy="auto",
            steps=1,
            in_process=True,
        )
