"""``FILE.py:function``: a Python file of the user's, and a function in it.

The function makes a model: it is called without arguments and returns ``(model, args, kwargs)``.
Or it makes a training program, ``(step_fn, data)`` or a dict or object with these and more. Or it
is a policy. The file is run as a module named after it, with its folder on the import path,
as ``python FILE.py`` would; a model and a policy may be in one file, which then runs once.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch

from shardwright.cli.options import DEVICES, SplitOptions
from shardwright.cli.steps import Steps
from shardwright.errors import CaptureError, InputError, PlanError, ShardwrightError
from shardwright.ir import IRGraph
from shardwright.planner import plan
from shardwright.planning import Plan, Policy
from shardwright.planning.plan import check_belongs
from shardwright.tracing import capture
from shardwright.tracing.program_set import ProgramSet
from shardwright.training import program as training_program
from shardwright.training.data import Loading
from shardwright.training.program import check_alone, program_with


class Example(NamedTuple):
    """A model and the arguments of one call of it."""

    model: torch.nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class UserTraining(NamedTuple):
    """What `train` takes of a user's program; see there."""

    step_fn: Callable[..., Any]
    data: Any
    evaluate: Callable[..., Any] | None = None
    eval_data: Any = None
    scheduler: Any = None


class UserFiles:
    """The Python files of a user's that one command has run, by path."""

    def __init__(self) -> None:
        self._modules: dict[Path, ModuleType] = {}

    def example(self, target: str) -> Example:
        """Call the function that ``FILE.py:function`` names for a model and arguments.

        Raises CaptureError where there is no such file or function, where it fails, or where it
        returns something else.
        """
        make = self._function(target, CaptureError)
        return _as_example(_guarded(make, target, CaptureError)(), target)

    def training(self, target: str) -> UserTraining:
        """Call the function that ``FILE.py:function`` names for a step function and its data.

        Raises CaptureError as `example` does.
        """
        make = self._function(target, CaptureError)
        return _as_training(_guarded(make, target, CaptureError)(), target)

    def either(self, target: str) -> Example | UserTraining:
        """Call the function that ``FILE.py:function`` names, for whichever of the two it makes.

        Raises CaptureError as `example` does.
        """
        made = _guarded(self._function(target, CaptureError), target, CaptureError)()
        if (example := _model_of(made)) is not None:
            return example
        program = _program_of(made)
        if program is not None:
            return program
        raise CaptureError(
            f"{target} must return (model, args, kwargs), or (step_fn, data) for a training step; "
            f"it returned {_described(made)}"
        )

    def policy(self, target: str) -> Policy:
        """The policy that ``FILE.py:function`` names; where it fails it raises PlanError.

        Raises PlanError where there is no such file or function.
        """
        return _guarded(self._function(target, PlanError), target, PlanError)

    def _function(self, target: str, failure: type[ShardwrightError]) -> Callable[..., Any]:
        name, _, function = target.rpartition(":")
        if not name or not function:
            raise failure(f"{target!r} names no function; write FILE.py:function")
        path = Path(name)
        if path.suffix != ".py" or not path.is_file():
            raise failure(f"there is no Python file {name}")
        if path not in self._modules:
            self._modules[path] = _guarded(_run, name, failure)(path)
        found = getattr(self._modules[path], function, None)
        if not callable(found):
            raise failure(f"{name} defines no function {function}")
        return found  # type: ignore[no-any-return]


def _guarded(
    function: Callable[..., Any], target: str, failure: type[ShardwrightError]
) -> Callable[..., Any]:
    """The function, with what it raises told in one line; errors of this package stay."""

    @functools.wraps(function)
    def guarded(*args: Any) -> Any:
        try:
            return function(*args)
        except ShardwrightError:
            raise
        except Exception as error:
            raise failure(
                f"{target} raised {type(error).__name__}: {error}; add --debug to see where"
            ) from error

    return guarded


def _run(path: Path) -> ModuleType:
    """The file's module, kept in ``sys.modules`` so that its classes can be found."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None, "a .py file always has a loader"
    sys.path.insert(0, str(path.parent.resolve()))
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def _model_of(made: Any) -> Example | None:
    if isinstance(made, tuple) and len(made) == 3:
        model, args, kwargs = made
        right = isinstance(args, tuple | list) and (kwargs is None or isinstance(kwargs, dict))
        if isinstance(model, torch.nn.Module) and right:
            return Example(model, tuple(args), kwargs or {})
    return None


def _program_of(made: Any) -> UserTraining | None:
    names = UserTraining._fields
    if isinstance(made, tuple):
        given = dict(zip(names, made, strict=False)) if len(made) <= len(names) else {}
    elif isinstance(made, dict):
        given = made if made.keys() <= set(names) else {}
    else:
        given = {name: getattr(made, name) for name in names if hasattr(made, name)}
    step_fn = given.get("step_fn")
    is_function = callable(step_fn) and not isinstance(step_fn, torch.nn.Module)
    if is_function and given.get("data") is not None:
        return UserTraining(**given)
    return None


def _as_example(made: Any, target: str) -> Example:
    found = _model_of(made)
    if found is None:
        raise CaptureError(
            f"{target} must return (model, args, kwargs): a torch.nn.Module, a tuple and a dict; "
            f"it returned {_described(made)}"
        )
    return found


def _as_training(made: Any, target: str) -> UserTraining:
    found = _program_of(made)
    if found is None:
        raise CaptureError(
            f"{target} must return (step_fn, data), or a dict or object with "
            f"{', '.join(UserTraining._fields)}, of which the first two are needed; it returned "
            f"{_described(made)}"
        )
    return found


def _described(made: Any) -> str:
    if isinstance(made, tuple):
        return f"({', '.join(type(part).__name__ for part in made)})"
    if isinstance(made, dict):
        return f"a dict with {', '.join(map(str, made)) or 'nothing'}"
    return f"a {type(made).__name__}"


# --- its graph and its plan -----------------------------------------------------------------------


def capture_program(program: Example | UserTraining, microbatches: int) -> IRGraph:
    """The graph of a model, or of a training step on one of its microbatches."""
    if isinstance(program, Example):
        return capture(*program)
    batch = Loading(program.data, seed=0).first()
    return training_program.TrainingProgram(
        program.step_fn, batch, microbatches=microbatches, seed=0
    ).graph


def plan_program(
    program: Example | UserTraining,
    files: UserFiles,
    options: SplitOptions,
    steps: Steps,
    plan_file: Path | None = None,
) -> tuple[IRGraph, Plan]:
    """The graph of a program and its plan: from a file, or as the options say.

    Raises CaptureError, PlanError, InputError.
    """
    found, wanted = _asked(files, options, plan_file)
    if isinstance(program, UserTraining):
        with steps.step("capture and plan"):
            first = Loading(program.data, seed=0).first()
            step, made = program_with(program.step_fn, first, wanted, plan=found)
            return step.graph, made
    with steps.step("capture"):
        graph = capture(*program)
    return graph, _planned(graph, found, wanted, steps)


def plan_programs(
    program: Example | UserTraining,
    dynamic: Mapping[str, Any],
    files: UserFiles,
    options: SplitOptions,
    steps: Steps,
    plan_file: Path | None = None,
) -> tuple[ProgramSet, Plan]:
    """As `plan_program`, of a model whose sizes vary as arguments of `capture` say."""
    found, wanted = _asked(files, options, plan_file)
    if isinstance(program, UserTraining):
        raise InputError(
            "train makes a program for each shape of a step's batches; leave --dynamic out"
        )
    with steps.step("capture"):
        programs = capture(*program, **dynamic)
    return programs, _planned(programs.first, found, wanted, steps)


def _asked(
    files: UserFiles, options: SplitOptions, plan_file: Path | None
) -> tuple[Plan | None, dict[str, Any]]:
    """The plan that a file has, or else the arguments of `plan` that options give."""
    if plan_file is not None:
        return load_plan(plan_file, options), {}
    wanted = options.arguments(files.policy)
    if "mesh" not in wanted:
        wanted.setdefault("devices", DEVICES)
    return None, wanted


def _planned(graph: IRGraph, found: Plan | None, wanted: Mapping[str, Any], steps: Steps) -> Plan:
    """The plan of a model's graph, which one that was ``found`` belongs to."""
    with steps.step("plan"):
        if found is None:
            return plan(graph, **wanted)
        check_belongs(found, graph)
        return found


def load_plan(path: Path, options: SplitOptions) -> Plan:
    """The plan of a file. Raises PlanError where options ask for another one as well."""
    check_alone({f"--{name}": value for name, value in options.given().items()})
    return Plan.load(path)
