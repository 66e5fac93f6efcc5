"""Training steps of models of the zoo that are split: loss and gradients are eager's.

One step of SGD with a large rate: what a parameter moves is its gradient. The batch comes in two
microbatches whose losses weigh by their labels.
"""

import dataclasses
from functools import cache

import pytest
import torch

from shardwright.planner import plan
from shardwright.tracing import compile_ir
from tests.building.step_runs import StepRun

pytest.importorskip("transformers")

from tests.turns import rotated
from tests.zoo.captures import SHALLOW, unchanged
from zoo.training import joined, trained

pytestmark = [
    pytest.mark.zoo,
    pytest.mark.filterwarnings("ignore::Warning:transformers"),
    pytest.mark.filterwarnings("ignore::shardwright.CaptureWarning"),
]

RATE = 1e3
SINGLE_LOSS = 1e-6
"""Most language models compute their loss in float32 whatever the parameters are."""
SPLIT = ("gpt2", "llama", "gemma3", "t5", "bart", "swin", "convnext")
MESHES = {
    "tensor": {"mesh": {"tensor": 2}, "microbatches": 2},
    "data": {"mesh": {"data": 2}, "microbatches": 1},
}


@cache
def step(name):
    """A model with SGD, and the graph of a microbatch's step."""
    entry = trained(name, torch.float64, layers=SHALLOW)
    optimizer = torch.optim.SGD(entry.model.parameters(), lr=RATE)
    entry = dataclasses.replace(entry, optimizer=optimizer)
    return entry, compile_ir(entry.step, **entry.microbatches(1)[0])


def check(name, options):
    entry, graph = step(name)
    with unchanged(entry):
        compare(entry, graph, options)


def compare(entry, graph, options):
    batches = entry.microbatches(options["microbatches"])
    before = {key: p.detach().clone() for key, p in entry.model.named_parameters()}
    run = StepRun(graph, plan(graph, **options))
    tensors = {key: value for key, value in joined(batches).items() if torch.is_tensor(value)}
    loss = run.step({**tensors, "lr": torch.tensor(RATE, dtype=torch.float64)})
    expected = entry.accumulated(batches)
    assert abs(loss - expected) <= SINGLE_LOSS * abs(expected)
    moves = {key: p.detach() - before[key] for key, p in entry.model.named_parameters()}
    largest = max(float(move.abs().max()) for move in moves.values())
    found = {key.removeprefix("model."): tensor for key, tensor in run.stored(["param"]).items()}
    whole = {key.removeprefix("model."): key for key in moves}
    assert found.keys() <= whole.keys()
    for key, tensor in found.items():
        expected_move = moves[whole[key]]
        limit = SINGLE_LOSS * max(float(expected_move.abs().max()), 1e-3 * largest)
        distance = (tensor - before[whole[key]] - expected_move).abs().max()
        assert distance <= limit, (key, distance)


@pytest.mark.parametrize(("name", "mesh"), rotated(SPLIT, tuple(MESHES)))
def test_split_steps_have_the_gradients_of_eager(name, mesh):
    check(name, MESHES[mesh])
