"""A program's step as a graph, and the plan it is trained by.

Comes in: a step function, a batch, and a plan or what `plan` is asked for. Goes out: the
`TrainingProgram` of one microbatch, and its plan. What always holds: the plan belongs to the
program's graph.

A step's graph has the shapes of one microbatch. Where a plan is searched for (``auto``) and nobody
says in how many microbatches a batch is cut, it is captured and planned for each number that
divides the batch, and the fastest is taken: they all make a step of the same samples.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from shardwright.errors import CaptureError, PlanError
from shardwright.planner import plan as make_plan
from shardwright.planner.auto import AUTO
from shardwright.planning import Plan
from shardwright.planning.plan import check_belongs
from shardwright.planning.step import mixing_notes
from shardwright.planning.step_graph import forward_view
from shardwright.training.loading import Batch
from shardwright.training.program import TrainingProgram, batch_size

MOST_MICROBATCHES = 64
"""More are not tried unless they are asked for."""


def program_with(
    step_fn: Callable[..., Any],
    batch: Batch,
    asked: Mapping[str, Any],
    *,
    plan: Plan | None = None,
    seed: int = 0,
    note: Callable[[str], None] = lambda text: None,
) -> tuple[TrainingProgram, Plan]:
    """The program of a step, captured with one of a batch's microbatches, and its plan.

    ``note`` is told when planning begins.
    ``asked`` are arguments of `plan` by name; those that are None are not asked for. Raises
    PlanError where the plan given is of another graph, or something is asked for beside it.
    """
    given = {name: value for name, value in asked.items() if value is not None}
    if plan is not None:
        return _follow(step_fn, batch, plan, given, seed)
    if given.get("policy") == AUTO and "microbatches" not in given:
        note("planning it in each number of microbatches")
        return _fastest(step_fn, batch, given, seed)
    count = given.get("microbatches", 1)
    program = TrainingProgram(step_fn, batch, microbatches=count, seed=seed)
    note(f"planning it in {_listed(count, 'microbatch', 'microbatches')}")
    return program, make_plan(program.graph, **given)


def _listed(count: int, one: str, several: str) -> str:
    return f"{count} {several if count > 1 else one}"


def _fastest(
    step_fn: Callable[..., Any], batch: Batch, given: Mapping[str, Any], seed: int
) -> tuple[TrainingProgram, Plan]:
    """The program and the plan of as many microbatches as make a step of this batch fastest.

    Only of the whole batch where microbatches would change what is computed; numbers with whose
    microbatches the step cannot be captured are left out. Raises PlanError where none fits.
    """
    found: list[tuple[TrainingProgram, Plan]] = []
    refusals: list[PlanError] = []
    for count in _divisors(batch_size(batch.tensors)):
        try:
            program = TrainingProgram(step_fn, batch, microbatches=count, seed=seed)
        except CaptureError:
            if count == 1:
                raise
            continue
        try:
            found.append((program, make_plan(program.graph, microbatches=count, **given)))
        except PlanError as error:
            refusals.append(error)
        if mixing_notes(forward_view(program.graph), 2, 1):
            break
    if not found:
        raise refusals[0]
    return min(found, key=lambda pair: _step_time(pair[1]))


def _divisors(size: int) -> list[int]:
    return [count for count in range(1, min(size, MOST_MICROBATCHES) + 1) if size % count == 0]


def _step_time(plan: Plan) -> float:
    assert plan.prediction is not None, "a plan that was searched for has a prediction"
    return plan.prediction.step_time


def _follow(
    step_fn: Callable[..., Any], batch: Batch, plan: Plan, given: Mapping[str, Any], seed: int
) -> tuple[TrainingProgram, Plan]:
    """The program with as many microbatches as a plan has, and the plan."""
    check_alone(given)
    if plan.training is None:
        raise PlanError(
            f"the plan for {plan.graph!r} is of a model; plan the training step, from the same "
            "function that is trained"
        )
    program = TrainingProgram(step_fn, batch, microbatches=plan.training.microbatches, seed=seed)
    check_belongs(plan, program.graph)
    return program, plan


def check_alone(given: Mapping[str, Any]) -> None:
    """Raise PlanError where something is asked for beside a plan that is given."""
    if given:
        raise PlanError(
            f"a plan is given, which settles what {', '.join(given)} would; leave that out, or "
            "plan again with it"
        )
