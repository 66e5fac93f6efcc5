"""Generated files as tests see them: written, imported, and run partition after partition."""

import importlib.util
import itertools
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

import shardwright as sw
from shardwright.ir import IRGraph
from shardwright.planning.assemble import make_plan
from shardwright.planning.plan import Assignment, Plan

_NUMBERS = itertools.count()


def cut(graph: IRGraph, places: Sequence[int]) -> Plan:
    """The plan of stages that begin at the first node and at these."""
    bounds = [0, *places, len(graph.nodes)]
    devices = tuple(f"d{i}" for i in range(len(bounds) - 1))
    assigned = [
        Assignment.on(device)
        for device, (start, stop) in zip(devices, pairwise(bounds), strict=True)
        for _ in range(start, stop)
    ]
    return make_plan(graph, "cut", devices, assigned)


def written(graph: IRGraph, plan: Plan | int, folder: Path, **options: Any) -> ModuleType:
    """The module generated for a graph by a plan, or for so many stages."""
    plan = sw.plan(graph, plan) if isinstance(plan, int) else plan
    path = folder / f"generated_{next(_NUMBERS)}.py"
    sw.codegen(plan, path, graph=graph, **options)
    return imported(path)


def imported(path: Path) -> ModuleType:
    """A file as a module of its own."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def configured(module: ModuleType, model: nn.Module | None = None) -> dict[str | int, Any]:
    """The configuration of a generated module, all on the CPU."""
    found: dict[str | int, Any] = module.create_pipeline_configuration(model, debug=True)
    return found


def partitions(configuration: Mapping[str | int, Any]) -> list[dict[str, Any]]:
    """The partitions of a configuration in order."""
    return [configuration[i] for i in range(len(configuration) - 2)]


def stages(configuration: Mapping[str | int, Any]) -> list[nn.Module]:
    """The modules of a configuration in order."""
    return [part["model"] for part in partitions(configuration)]


def steps(
    configuration: Mapping[str | int, Any], inputs: Mapping[str, torch.Tensor]
) -> Iterator[tuple[dict[str, Any], list[torch.Tensor], list[torch.Tensor]]]:
    """Each partition with what it is given and what it gives."""
    held = dict(inputs)
    for part in partitions(configuration):
        given = [held[name] for name in part["inputs"]]
        found = part["model"](*given)
        results = list(found) if isinstance(found, tuple) else [found]
        held.update(zip(part["outputs"], results, strict=True))
        yield part, given, results


def run(
    configuration: Mapping[str | int, Any], inputs: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """The model's outputs by name, from its inputs by name."""
    held = dict(inputs)
    for part, _, results in steps(configuration, inputs):
        held.update(zip(part["outputs"], results, strict=True))
    return {name: held[name] for name in configuration["model outputs"]}
