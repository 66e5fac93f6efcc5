"""Every way through shardwright, in which a program must compute what eager PyTorch computes.

A way is a function of a `Case`. It returns where all is equal, raises `MismatchError` where a
number is another, and lets every other exception out: a refusal, or a failure, as `outcome` says.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import shardwright as sw
from fuzz.case import Case, MismatchError, Trained, call, equal, held, imported, loss_of
from shardwright.ir.structure import flatten_call, leaves

REFUSALS = (
    sw.CaptureError,
    sw.PlanError,
    sw.CodegenError,
    sw.ExecError,
    sw.InputError,
    sw.ScheduleError,
)
"""What a program may be refused with, before anything is lost; all else is a failure."""


# --- forward ---


def verified(pipeline: sw.Pipeline, case: Case, tolerance: float, **options: Any) -> None:
    """Run a pipeline, and hold it to the model's result."""
    args, kwargs = copy.deepcopy(case.call)
    found = sw.run(pipeline, *args, **{"in_process": True, **options}, **kwargs)
    equal("output", found, case.expected, tolerance)


def stages(case: Case) -> None:
    """Two and three stages: the model's bits, and its result but for how its own kernels round."""
    for count in (2, 3)[: 1 if len(case.graph.nodes) < 3 else 2]:
        pipeline = sw.build(case.graph, sw.plan(case.graph, devices=count))
        sw.check(pipeline)
        try:
            sw.verify(pipeline, case.model(), *case.call)
        except sw.VerifyError as error:
            raise MismatchError(str(error)) from error
        verified(pipeline, case, case.rounding)


def _mesh(**mesh: int) -> Callable[[Case], None]:
    def way(case: Case) -> None:
        pipeline = sw.build(case.graph, sw.plan(case.graph, mesh=mesh))
        sw.check(pipeline)
        verified(pipeline, case, case.tolerance)

    return way


def compiled(case: Case) -> None:
    """`sw.compile` of the model, called twice, with other inputs the second time."""
    model, reference = case.model(), case.model()
    args, kwargs = copy.deepcopy(case.call)
    program = sw.compile(model, *args, **kwargs)
    for seed in (1, 2):
        args, kwargs = case.module.arguments(seed)
        with torch.no_grad():
            expected = reference(*copy.deepcopy(args), **copy.deepcopy(kwargs))
        equal(f"output {seed}", program(*args, **kwargs), expected, case.tolerance)
    equal("buffers", dict(model.state_dict()), dict(reference.state_dict()), case.tolerance)


def lowered(case: Case) -> None:
    """Two stages lowered to kernel calls."""
    pipeline = sw.lower(sw.build(case.graph, sw.plan(case.graph, devices=2)))
    sw.check(pipeline)
    verified(pipeline, case, case.tolerance)


def generated(case: Case) -> None:
    """Two stages as Python."""
    path = sw.codegen(sw.plan(case.graph, devices=2), case.folder / "stages.py", graph=case.graph)
    name = f"stages_{case.program.seed}"
    configuration = imported(name, path).create_pipeline_configuration(case.model(), DEBUG=True)
    held = _ports(case)
    count = sum(isinstance(key, int) for key in configuration)
    with torch.no_grad():
        for i in range(count):
            stage = configuration[i]
            made = stage["model"](*(held[name] for name in stage["inputs"]))
            made = made if isinstance(made, (tuple, list)) else (made,)
            held |= dict(zip(stage["outputs"], made, strict=True))
    expected = [leaf for leaf in pytree.tree_leaves(case.expected) if isinstance(leaf, Tensor)]
    named = dict(zip(case.graph.output_names, expected, strict=True))
    for name in set(configuration["model outputs"]) - _ports(case).keys():
        equal(f"output {name}", held[name], named[name], case.tolerance)


def _ports(case: Case) -> dict[str, Tensor]:
    """The tensors that a generated file takes, by the names of its inputs."""
    structure = case.graph.in_structure
    assert structure is not None
    tensors = flatten_call(structure, *case.call)
    return {leaf.name: tensor for leaf, tensor in zip(leaves(structure), tensors, strict=True)}


def kept(case: Case) -> None:
    """Write a file, with what it must give, for a fresh process to run."""
    graph = case.graph
    mesh = case.chance.choice(MESHES)
    pipeline = sw.build(graph, sw.plan(graph, mesh=mesh))
    if case.chance.random() < 0.4:
        pipeline = sw.lower(pipeline)
    pipeline.save(case.folder / "model.pipeline.json")
    wanted = {"call": case.call, "expected": case.expected, "tolerance": case.tolerance}
    torch.save(wanted, case.folder / "expected.pt")


def worker_processes(case: Case) -> None:
    """Two stages, or two parts, on processes."""
    mesh = case.chance.choice(MESHES)
    pipeline = sw.build(case.graph, sw.plan(case.graph, mesh=mesh))
    verified(pipeline, case, case.tolerance, in_process=False, timeout=30)


def fewer_rows(case: Case) -> None:
    """A pipeline, called with one row and with one fewer than it has: padded, or refused."""
    pipeline = sw.build(case.graph, sw.plan(case.graph, mesh=case.chance.choice(MESHES)))
    with sw.Runner(pipeline, in_process=True) as runner:
        _called_with(case, runner, (1, case.facts["rows"] - 1))


def other_sizes(case: Case) -> None:
    """A bundle, called with fewer rows, as many, and more: padded, or by programs of their own."""
    rows, ports = case.facts["rows"], _ports(case)
    dynamic = {name: {0: "rows"} for name, t in ports.items() if t.dim() and len(t) == rows}
    model = case.model()
    args, kwargs = copy.deepcopy(case.call)
    programs = sw.capture(model, args, kwargs, dynamic=dynamic)
    bundle = sw.build(programs, sw.plan(programs, mesh=case.chance.choice(MESHES)))
    with sw.Runner(bundle, in_process=True) as runner:
        _called_with(case, runner, (1, rows - 1, rows, rows + 1))


def _called_with(case: Case, runner: sw.Runner, counts: tuple[int, ...]) -> None:
    """Call a runner with so many rows each, and hold it to the model."""
    reference, rows = case.model(), case.facts["rows"]
    for count in counts:
        args, kwargs = pytree.tree_map_only(
            Tensor, lambda t, count=count: _with_rows(t, rows, count), case.call
        )
        trial = copy.deepcopy(reference)
        try:
            with torch.no_grad():
                expected = trial(*copy.deepcopy(args), **copy.deepcopy(kwargs))
        except Exception:  # the program is of other rows alone, and may have written its buffers
            continue
        reference = trial
        equal(f"output of {count} rows", runner(*args, **kwargs), expected, case.tolerance)


def _with_rows(tensor: Tensor, rows: int, count: int) -> Tensor:
    """A tensor of so many rows with others; one that has not as many stays."""
    if not tensor.dim() or len(tensor) != rows:
        return tensor
    return tensor[[k % rows for k in range(count)]]


# --- training ---


def trained(case: Case, expected: Trained | None = None, **options: Any) -> Trained:
    """Train by these options; losses, weights and buffers are eager's."""
    model, _, step = case.module.train()
    before = copy.deepcopy(model.state_dict())
    try:
        result = sw.train(
            step, case.batches(), epochs=1, quiet=True, **{"in_process": True, **options}
        )
    except sw.ShardwrightError:
        equal("a refused step's model", model.state_dict(), before, 0.0)
        raise
    found = Trained([float(loss) for loss in result.losses], model.state_dict())
    held(found, expected or case.eager, case.tolerance)
    return found


def _training(**options: Any) -> Callable[[Case], None]:
    def way(case: Case) -> None:
        trained(case, **options)

    return way


def compiled_step(case: Case) -> None:
    """`sw.compile` of the step."""
    model, _, step = case.module.train()
    batches = case.batches()
    first = batches[0]
    program = sw.compile(step, **first) if isinstance(first, dict) else sw.compile(step, *first)
    losses = [loss_of(call(program, batch)) for batch in batches]
    held(Trained(losses, model.state_dict()), case.eager, case.tolerance)


def resumed(case: Case) -> None:
    """A checkpoint after two steps, taken up on another mesh."""
    meshes = [{"pipeline": 2}, {"tensor": 2}, {"data": 2}, {"pipeline": 1}]
    if case.facts["batch_norm"]:
        meshes = [{"pipeline": 2}, {"tensor": 2}, {"pipeline": 1}]
    first, second = case.chance.sample(meshes, 2)
    folder = case.folder / "checkpoint"
    options = {"quiet": True, "in_process": True, "checkpoint": folder}
    _, _, step = case.module.train()
    sw.train(step, case.batches(), mesh=first, epochs=1, steps=2, **options)
    model, _, step = case.module.train()
    result = sw.train(step, case.batches(), mesh=second, epochs=1, resume=True, **options)
    losses = [float(loss) for loss in result.losses]
    equal(
        f"losses after {first} to {second}",
        losses,
        case.eager.losses[-len(losses) :],
        case.tolerance,
    )
    equal("state", dict(model.state_dict()), dict(case.eager.state), case.tolerance * 10)


def dropped(case: Case) -> None:
    """Dropout: the same on every mesh and compiled, of the operator that counts."""
    model, _, step = case.module.train()
    result = sw.train(step, case.batches(), mesh={"data": 1}, epochs=1, quiet=True, in_process=True)
    expected = Trained([float(x) for x in result.losses], model.state_dict())
    mesh = case.chance.choice(MESHES)
    trained(case, expected, mesh=mesh)


def kept_step(case: Case) -> None:
    """Write the file of a step, with the losses that it must give, for a fresh process to run."""
    model, optimizer, step = case.module.train()
    batches = case.batches()
    first = batches[0]
    graph = sw.compile_ir(step, **first) if isinstance(first, dict) else sw.compile_ir(step, *first)
    pipeline = sw.build(graph, sw.plan(graph, mesh=case.chance.choice(MESHES)))
    if case.chance.random() < 0.4:
        pipeline = sw.lower(pipeline)
    pipeline.save(case.folder / "model.pipeline.json")
    rates = _rates(graph, model, optimizer)
    wanted = {"batches": batches, "rates": rates, "losses": case.eager.losses}
    torch.save({**wanted, "tolerance": case.tolerance}, case.folder / "expected.pt")


def _rates(graph: sw.IRGraph, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The inputs with learning rates, by the parameters that each updates."""
    parameters, rates = dict(model.named_parameters()), {}
    for node in graph.nodes:
        name = graph.values[node.inputs[0]].name if node.inputs else ""
        if name == "lr" or name.startswith("lr_"):
            updated = parameters[node.attrs["parameters"][0]]
            (rates[name],) = (
                group["lr"]
                for group in optimizer.param_groups
                if any(parameter is updated for parameter in group["params"])
            )
    return rates


def training_processes(case: Case) -> None:
    """Two slots on processes."""
    mesh = case.chance.choice([{"pipeline": 2}, {"tensor": 2}])
    trained(case, mesh=mesh, in_process=False, timeout=30)


MESHES = [{"pipeline": 2}, {"tensor": 2}, {"data": 2}]


class Way(NamedTuple):
    """A way, whom it is for, and in how many of a hundred programs CI takes it."""

    run: Callable[[Case], None]
    fits: Callable[[Case], bool]
    share: float


def _any(case: Case) -> bool:
    return True


def _learns(case: Case) -> bool:
    return bool(case.facts["trains"] and not case.facts["dropout"]) and case.is_stable


def _learns_steadily(case: Case) -> bool:
    return _learns_sharded(case) and "scheduler" not in case.program.text


def _learns_sharded(case: Case) -> bool:
    return _learns(case) and not case.facts["batch_norm"] and not case.facts["writes"]


def _learns_in_halves(case: Case) -> bool:
    return _learns(case) and case.in_halves


def _draws(case: Case) -> bool:
    return bool(case.facts["trains"] and case.facts["dropout"])


WAYS: dict[str, Way] = {
    "stages": Way(stages, _any, 1.0),
    "tensor": Way(_mesh(tensor=2), _any, 0.7),
    "data": Way(_mesh(data=2), _any, 0.5),
    "stages of tensor": Way(_mesh(pipeline=2, tensor=2), _any, 0.15),
    "compile": Way(compiled, _any, 0.6),
    "lower": Way(lowered, _any, 0.3),
    "codegen": Way(generated, _any, 0.3),
    "fresh process": Way(kept, _any, 0.3),
    "workers": Way(worker_processes, _any, 0.02),
    "train in stages": Way(_training(mesh={"pipeline": 2}), _learns, 0.6),
    "train by tensor": Way(_training(mesh={"tensor": 2}), _learns, 0.4),
    "train by data": Way(_training(mesh={"data": 2}), _learns_sharded, 0.4),
    "train in microbatches": Way(
        _training(mesh={"pipeline": 2}, microbatches=2), _learns_in_halves, 0.3
    ),
    "train by data in microbatches": Way(
        _training(mesh={"data": 2}, microbatches=2), _learns_in_halves, 0.15
    ),
    "train by zero bubble": Way(
        _training(mesh={"pipeline": 2}, microbatches=2, schedule="zb-h1"), _learns_in_halves, 0.15
    ),
    "train lowered": Way(_training(mesh={"pipeline": 2}, lower=True), _learns, 0.15),
    "train recomputing": Way(_training(mesh={"pipeline": 2}, recompute="full"), _learns, 0.1),
    "train by a shared optimizer": Way(_training(mesh={"data": 2}, zero=1), _learns_sharded, 0.1),
    "compile the step": Way(compiled_step, _learns, 0.6),
    "resume": Way(resumed, _learns, 0.15),
    "train in a fresh process": Way(kept_step, _learns_steadily, 0.2),
    "dropout": Way(dropped, _draws, 1.0),
    "train on workers": Way(training_processes, _learns, 0.02),
    "other sizes": Way(other_sizes, _any, 0.3),
    "fewer rows": Way(fewer_rows, _any, 0.5),
}


class Outcome(NamedTuple):
    """How a way ended: ``right``, ``refused`` or ``failed``, and why."""

    kind: str
    reason: str = ""


def outcome(way: str, case: Case) -> Outcome:
    """Go one way, and say how it ended."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            WAYS[way].run(case)
        except REFUSALS as error:
            return Outcome("refused", f"{type(error).__name__}: {error}")
        except MismatchError as error:
            return Outcome("failed", f"wrong: {error}")
        except Exception as error:
            return Outcome("failed", f"{type(error).__name__}: {error}{_where(error)}")
    return Outcome("right")


def _where(error: BaseException) -> str:
    trace = error.__traceback__
    place = ""
    while trace is not None:
        path = trace.tb_frame.f_code.co_filename
        if "/shardwright/" in path:
            name = path.rpartition("/shardwright/")[2]
            place = f"\n  at {name}:{trace.tb_lineno} in {trace.tb_frame.f_code.co_name}"
        trace = trace.tb_next
    return place
