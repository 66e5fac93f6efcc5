"""`train`: an ordinary training step for one device, run on a mesh.

    first batch → Program (the step's graph) → plan → build → TrainingRunner → steps

This module puts the parts together; `loop` goes through the steps.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from torch.optim.lr_scheduler import LRScheduler

from shardwright.clusters import Cluster
from shardwright.costs import Profile
from shardwright.devices import DeviceKind
from shardwright.launch.torchrun import is_torchrun
from shardwright.planning import Plan
from shardwright.tracing.rates import Factor, Rates
from shardwright.training.data import Data, Loading
from shardwright.training.loop import TrainLoop
from shardwright.training.options import TrainOptions
from shardwright.training.program import program_with
from shardwright.training.programs import Evaluation, ProgramBuilder, StepBuckets, shape_text
from shardwright.training.result import TrainResult


def train(
    step_fn: Callable[..., Any],
    data: Data,
    *,
    mesh: Mapping[str, int] | None = None,
    devices: int | Cluster | None = None,
    policy: str | None = None,
    plan: Plan | None = None,
    profile: Profile | None = None,
    microbatches: int | None = None,
    schedule: str | None = None,
    chunks: int | None = None,
    recompute: str | None = None,
    memory: int | None = None,
    zero: int | None = None,
    device_kind: DeviceKind = "cpu",
    lower: bool = False,
    epochs: int | None = None,
    steps: int | None = None,
    evaluate: Callable[..., Any] | None = None,
    eval_data: Data | None = None,
    eval_every: int | None = None,
    scheduler: LRScheduler | Sequence[LRScheduler] | Factor | None = None,
    checkpoint: str | Path | None = None,
    checkpoint_every: int | None = None,
    resume: bool | Literal["auto"] = False,
    restarts: int = 0,
    log: str | Path | None = None,
    tensorboard: str | Path | None = None,
    trace: str | Path | None = None,
    quiet: bool = False,
    in_process: bool = False,
    timeout: float = 60.0,
    threads: int = 1,
    modules: Sequence[str] = (),
    drop_last: bool = False,
    write_back: bool = True,
    seed: int = 0,
) -> TrainResult:
    """Train on a mesh of devices with a step written for one device.

    step_fn
        Runs one step: computes a loss from a batch, calls ``backward()``, and the optimizer's
        ``step()`` and ``zero_grad()``. It reaches its model and optimizer as any function does. Its
        result is reported; the loss is the number named ``loss``, or the first number.
    data
        The batches, each a tuple or dict of arguments or the single argument: a DataLoader, a list,
        or a function from the number of an epoch to one of these. Batches of another shape than the
        first, such as a shorter last one, get a program of their own on the same state, which
        splits their rows into equal microbatches.
    drop_last
        Whether to skip batches with fewer rows than the first.
    mesh, devices, policy, profile, microbatches, schedule, chunks, recompute, memory, zero
        As for `plan`, with its defaults. Without mesh and devices: one device, or as many as
        torchrun has ranks. With ``policy="auto"`` the number of microbatches is searched for too,
        unless it is given. Instead of all of these, pass ``plan``, made for the graph of one
        microbatch.
    device_kind
        The kind of every device, as for `build`.
    lower
        Whether to run kernel calls instead of operators; see `shardwright.lower`.
    evaluate, eval_data, eval_every
        A function of a batch whose numbers are averaged over ``eval_data``, after every so many
        steps and at the end. It runs with its modules in eval mode.
    scheduler
        A torch scheduler of the optimizer, stepped once per step, or a function from the step (0
        on) to a factor of the optimizer's learning rate. Schedulers that step_fn steps need not be
        given. Only learning rates may change: OneCycleLR and CyclicLR need cycle_momentum=False.
    epochs, steps
        Number of passes over the data, or of steps in total; whichever ends first.
    checkpoint, checkpoint_every, resume
        A directory for checkpoints, one every so many steps and one at the end. With ``resume`` the
        run resumes from the latest, if there is one, with the batches, learning rates and dropout
        of an uninterrupted run; the mesh may be another.
    restarts
        How often lost workers are replaced, from the last checkpoint on.
    log, tensorboard, quiet
        A file of JSON lines, a directory for TensorBoard, and whether to show nothing. Progress
        goes to the error stream: a line for each phase before the first step and each note of the
        plan, then steps.
    trace
        A file for a Chrome trace of all devices in each step, in the format of `simulate`. It grows
        with the number of steps.
    in_process, timeout, threads, modules
        As for `Runner`.
    seed
        Seed of the data's order and of dropout.
    write_back
        Whether the program's model and optimizer receive the trained values at the end.

    Under torchrun every rank makes the same call and runs one device; rank 0 reports. Raises
    CaptureError, PlanError, InputError, and RunError with its subclasses if workers fail.
    """
    options = TrainOptions(
        epochs=epochs,
        steps=steps,
        eval_every=eval_every,
        checkpoint=checkpoint,
        checkpoint_every=checkpoint_every,
        resume=bool(resume),
        restarts=restarts,
        log=log,
        tensorboard=tensorboard,
        trace=trace,
        quiet=quiet,
        in_process=in_process,
        timeout=timeout,
        threads=threads,
        modules=modules,
        drop_last=drop_last,
        write_back=write_back,
        seed=seed,
    )
    options.check(data, evaluate=evaluate is not None, eval_data=eval_data is not None)
    display = options.make_display()
    loading = Loading(data, seed=seed, epochs=epochs)
    if plan is None and devices is None and mesh is None:
        devices = _slots(in_process)
    asked = {
        "devices": devices,
        "policy": policy,
        "mesh": mesh,
        "profile": profile,
        "microbatches": microbatches,
        "schedule": schedule,
        "chunks": chunks,
        "recompute": recompute,
        "memory": memory,
        "zero": zero,
    }
    first = loading.first()
    display.note(f"capturing the step with a batch of {shape_text(first)}")
    program, plan = program_with(step_fn, first, asked, plan=plan, seed=seed, note=display.note)
    rates = Rates(program.captured.rates, scheduler, program.captured.schedulers)
    for text in plan.notes:
        display.note(f"note: {text}")
    builder = ProgramBuilder(program.graph, plan, device_kind, lower)
    evaluation = None
    if evaluate is not None and eval_data is not None:
        display.note("capturing and planning the evaluation")
        evaluation = Evaluation(evaluate, eval_data, builder, seed=seed)
        evaluation.prepare()
    display.note(f"building {'and lowering ' * lower}the pipeline")
    buckets = StepBuckets(step_fn, program, builder, seed=seed, note=display.note)
    if not drop_last:
        buckets.prepare(loading.other_shapes(program.batch, steps))
    return TrainLoop(
        options=options,
        loading=loading,
        program=program,
        buckets=buckets,
        rates=rates,
        evaluation=evaluation,
        result=TrainResult(plan, buckets.first.pipeline),
        display=display,
    ).run()


def _slots(in_process: bool) -> int:
    """How many slots where nobody says: as many as torchrun has ranks."""
    return int(os.environ["WORLD_SIZE"]) if is_torchrun() and not in_process else 1
