"""The zoo as generated code: every model in 2 or in 4 partitions, against eager.

Each model computes in the widest dtype it knows. A cut reorders nothing: outputs are held to the
last bit, gradients to rounding, for sums of gradients may come in another order. The files of all
models are checked at once, by ruff, by mypy, and by an interpreter that has no shardwright.
"""

import copy
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwright as sw
from shardwright.ir import IRGraph
from shardwright.ir.structure import describe_result
from tests.codegenerate.checkers import assert_passes_mypy, assert_passes_ruff
from tests.codegenerate.written import configured, imported, partitions, run, stages

pytest.importorskip("transformers")

from tests.turns import in_turn, rotated
from tests.zoo.captures import widest
from zoo.gradients import ROUNDING, gradient_distance, largest
from zoo.models import BY_NAME

pytestmark = [
    pytest.mark.zoo,
    pytest.mark.filterwarnings("ignore::Warning:transformers"),
]

PARTS = (2, 4)
MOST_SECONDS = 600
"""For what looks at all files, which writes those that are not there yet."""


@dataclass(frozen=True)
class Eager:
    """A model with a call of it, and what eager makes of that."""

    model: nn.Module
    graph: IRGraph
    inputs: dict[str, Tensor]
    outputs: dict[str, Tensor]
    gradients: dict[str, Tensor]
    double: bool


@cache
def eager(name: str) -> Eager:
    """A model in the widest dtype that it knows."""
    found = widest(name)
    graph = found.graph
    model = copy.deepcopy(found.model)
    names = [graph.values[value_id].name for value_id in graph.inputs]
    inputs = dict(zip(names, found.inputs, strict=True))
    outputs = dict(zip(graph.output_names, describe_result(model(**found.kwargs))[1], strict=True))
    return Eager(model, graph, inputs, outputs, gradients(model, outputs), found.double)


def gradients(model: nn.Module, outputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The gradients of the sum of all outputs' squares, in the model, which has none after it."""
    model.zero_grad()
    terms = [output.square().sum() for output in outputs.values() if output.requires_grad]
    torch.stack(terms).sum().backward()
    found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("generated")


_FILES: dict[tuple[str, int], Path] = {}


def written(name: str, parts: int, folder: Path) -> Path:
    """The file of a model in so many partitions, written once."""
    if (name, parts) not in _FILES:
        graph = eager(name).graph
        path = folder / f"{name}_{parts}.py"
        sw.codegen(sw.plan(graph, parts), path, graph=graph)
        _FILES[name, parts] = path
    return _FILES[name, parts]


def every_file(folder: Path) -> Iterator[tuple[str, Path]]:
    tried = sorted(in_turn(list(BY_NAME), PARTS))
    return ((name, written(name, parts, folder)) for name, parts in tried)


@pytest.mark.parametrize(("name", "parts"), rotated(list(BY_NAME), PARTS))
def test_partitions_are_the_model(name: str, parts: int, folder: Path) -> None:
    found = eager(name)
    model = copy.deepcopy(found.model)
    configuration = configured(imported(written(name, parts, folder)), model)
    assert len(partitions(configuration)) == parts
    assert_hold_the_models_tensors(stages(configuration), model)

    outputs = run(configuration, found.inputs)
    assert outputs.keys() == found.outputs.keys()
    assert all(torch.equal(outputs[key], output) for key, output in found.outputs.items())

    results = gradients(model, outputs)
    assert results.keys() == found.gradients.keys()
    most = largest(found.gradients)
    for key, gradient in found.gradients.items():
        distance = gradient_distance(results[key], gradient, most)
        assert distance <= ROUNDING[found.double], key

    assert_training_changes(model, configuration, found.inputs)


def assert_hold_the_models_tensors(made: list[nn.Module], model: nn.Module) -> None:
    """Parameters and buffers are the model's very own, and checkpoints are the model's.

    Constants that the model holds as plain tensors are buffers here, which no checkpoint has.
    """
    theirs = {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }
    for stage in made:
        ours = [
            *stage.named_parameters(remove_duplicate=False),
            *stage.named_buffers(remove_duplicate=False),
        ]
        assert all(tensor is theirs[key] for key, tensor in ours if key in theirs)
    saved = {key: tensor for stage in made for key, tensor in stage.state_dict().items()}
    checkpoint = model.state_dict()
    assert saved.keys() == checkpoint.keys()
    assert all(torch.equal(tensor, checkpoint[key]) for key, tensor in saved.items())
    own = {id(p) for stage in made for p in stage.parameters()}
    assert own == {id(p) for p in model.parameters()}


def assert_training_changes(
    model: nn.Module, configuration: dict[str | int, Any], inputs: dict[str, Tensor]
) -> None:
    """A step of an optimizer over the stages' parameters is one of the model's."""
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    own = {id(p): p for stage in stages(configuration) for p in stage.parameters()}
    optimizer = torch.optim.SGD(own.values(), lr=0.1)
    terms = [t.square().sum() for t in run(configuration, inputs).values() if t.requires_grad]
    torch.stack(terms).sum().backward()
    optimizer.step()
    for name, parameter in model.named_parameters():
        if parameter.grad is not None and bool(parameter.grad.any()):
            assert not torch.equal(parameter, before[name]), name


@pytest.mark.timeout(MOST_SECONDS)
def test_files_pass_ruff(folder: Path) -> None:
    files = [path for _, path in every_file(folder)]
    assert_passes_ruff(files)


@pytest.mark.timeout(MOST_SECONDS)
def test_files_pass_mypy(folder: Path) -> None:
    files = [path for _, path in every_file(folder)]
    assert_passes_mypy(files)


@pytest.mark.timeout(MOST_SECONDS)
def test_files_run_without_shardwright(folder: Path) -> None:
    """One interpreter, warnings being errors, for all files."""
    cases = []
    for name, path in every_file(folder):
        found = eager(name)
        checkpoint = {key: t.detach() for key, t in found.model.state_dict().items()}
        buffers = {k: t for k, t in found.model.named_buffers() if k not in checkpoint}
        outputs = {key: output.detach() for key, output in found.outputs.items()}
        cases.append(
            {
                "path": str(path),
                "inputs": found.inputs,
                "outputs": outputs,
                "checkpoint": checkpoint,
                "buffers": buffers,
            }
        )
    torch.save(cases, folder / "cases.pt")
    script = Path(__file__).parent / "standalone.py"
    command = [sys.executable, "-I", "-W", "error", str(script), str(folder / "cases.pt")]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert result.returncode == 0, f"{result.stdout[-4000:]}\n{result.stderr[-4000:]}"
