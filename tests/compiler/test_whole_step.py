"""A captured step as one graph: it computes what the step does, on the program's own tensors."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwright.compiler.sources import whole_step
from shardwright.ir import IRGraph
from shardwright.ir.execute import compile_graph
from shardwright.tracing import capture_step
from tests.compiler.steps import OPTIMIZERS, Program, assert_close, batches, network, program


def captured(made: Program, batch: Any) -> IRGraph:
    return whole_step(capture_step(made.step, batch))


class Running:
    """A whole step, run on tensors of its own."""

    def __init__(self, graph: IRGraph) -> None:
        self.graph = graph
        self.program = compile_graph(graph)
        self.stored = {value.id: self.contents(value) for value in graph.stored()}

    def contents(self, value: Any) -> Tensor:
        found = self.graph.tensors.get(value.id)
        dtype = {"f32": torch.float32, "i64": torch.int64}[value.dtype]
        return torch.zeros(value.shape, dtype=dtype) if found is None else found.detach().clone()

    def __call__(self, *inputs: Tensor) -> list[Tensor]:
        count = len(self.graph.inputs)
        rest = [self.stored[value_id] for value_id in self.program.arguments[count:]]
        results = self.program([*inputs, *rest])
        for old, new in zip(self.graph.updates, results[len(self.graph.outputs) :], strict=True):
            self.stored[old] = new
        return results[: len(self.graph.outputs)]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_whole_step_is_the_step(name: str) -> None:
    made, eager = program(OPTIMIZERS[name]), program(OPTIMIZERS[name])
    run = Running(captured(made, batches(1)[0]))
    lr = torch.tensor(made.optimizer.param_groups[0]["lr"], dtype=torch.float64)
    for x, y in batches(5):
        assert_close(run(x, y, lr)[0], eager.step(x, y), 1e-6)
    names = {value.id: value.names[0] for value in run.graph.stored()}
    found = {names[key].removeprefix("optimizer."): value for key, value in run.stored.items()}
    expected = eager.state()
    assert found.keys() == expected.keys()
    for key, tensor in found.items():
        assert_close(tensor, expected[key], 1e-5, key)


def test_it_has_the_programs_tensors_and_begins_the_others_with_zeros() -> None:
    made = program(OPTIMIZERS["adam"])
    graph = captured(made, batches(1)[0])
    own = {name: tensor.data_ptr() for name, tensor in made.model.state_dict().items()}
    held = {graph.values[key].names[0]: t.data_ptr() for key, t in graph.tensors.items()}
    assert held == own
    zeros = {value.names[0] for value in graph.stored() if value.init == "zeros"}
    assert zeros == {value.names[0] for value in graph.stored() if value.role == "state"}
    assert all(value.placements is None for value in graph.stored())


def test_draws_of_dropout_are_state_that_goes_on() -> None:
    made = program(OPTIMIZERS["sgd"], lambda: network(dropout=0.5))
    run = Running(captured(made, batches(1)[0]))
    (draws,) = (value.id for value in run.graph.stored() if value.name == "rng")
    assert [run.graph.values[i].name for i in run.graph.inputs] == ["x", "y", "lr"]
    x, y = batches(1)[0]
    lr = torch.zeros((), dtype=torch.float64)
    losses = [run(x, y, lr)[0].item() for _ in range(3)]
    assert len(set(losses)) == 3
    assert run.stored[draws].tolist() == [3]


def test_an_input_called_rng_stays_one_where_nothing_is_dropped() -> None:
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(rng: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(rng).sum()
        loss.backward()
        optimizer.step()
        return loss

    graph = whole_step(capture_step(step, (torch.ones(3, 2),)))
    assert [graph.values[i].name for i in graph.inputs] == ["rng", "lr"]
