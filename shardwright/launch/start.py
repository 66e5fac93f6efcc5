"""Starting what runs a pipeline: in this process, in processes of their own, or as torchrun's rank.

Comes in: a pipeline or its path. Goes out: the pipeline, known to be right, and a `Backend` on
which its slots are ready.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from msgspec.structs import replace

from shardwright.engine.program import is_training
from shardwright.engine.slot import torch_device
from shardwright.errors import LaunchError, RunError
from shardwright.launch.backend import Backend
from shardwright.launch.in_process import InProcess
from shardwright.launch.making import Options
from shardwright.launch.operators import load_operators
from shardwright.launch.processes import Processes
from shardwright.launch.torchrun import Rank, is_torchrun, outputs_on_first_slot
from shardwright.pipeline import Device, Pipeline, check


def checked(
    pipeline: Pipeline | str | Path, modules: Sequence[str] = (), *, weights: bool = True
) -> Pipeline:
    """The pipeline, known to be right, with operators and (if wanted) weights that are there.

    Raises PipelineError, WeightError, RunError.
    """
    if isinstance(pipeline, Pipeline):
        check(pipeline)
    else:
        pipeline = Pipeline.load(pipeline)
    if weights:
        pipeline.weights.check(pipeline.tensors)
    load_operators(pipeline, modules)
    if pipeline.requires:
        check(pipeline)  # Graphs that call operators of these modules could not be proved before.
    return pipeline


@dataclass(frozen=True, slots=True)
class Start:
    """Where slots are to run, and what workers import.

    ``npu_as_cpu`` runs slots of the kind ``npu`` on the CPU.
    """

    in_process: bool = False
    modules: Sequence[str] = ()
    npu_as_cpu: bool = False

    @property
    def is_rank(self) -> bool:
        """Whether this process is one of torchrun's ranks, and runs one slot."""
        return is_torchrun() and not self.in_process

    def slot_of(self, pipeline: Pipeline) -> str | None:
        """The slot that this process drives, as a rank; None where it drives all."""
        return list(pipeline.devices)[int(os.environ["RANK"])] if self.is_rank else None

    def arranged(self, pipeline: Pipeline) -> Pipeline:
        """The pipeline as it runs here.

        As a rank, outputs of calls come to the first slot; npu slots are CPU slots where asked.
        """
        if self.npu_as_cpu:
            pipeline = _npu_as_cpu(pipeline)
        moved = self.is_rank and not is_training(pipeline)
        return outputs_on_first_slot(pipeline) if moved else pipeline

    def __call__(
        self, pipeline: Pipeline, *, timeout: float, threads: int, options: Options
    ) -> Backend:
        """Start all slots. Raises RunError and its kinds; no process is left then."""
        _check_numbers(timeout, threads)
        if self.is_rank:
            return Rank(pipeline, timeout=timeout, threads=threads, options=options)
        _check_devices(pipeline)
        if self.in_process:  # On one machine, whichever hosts the slots are of.
            return InProcess(pipeline, threads=threads, options=options)
        _check_host(pipeline)
        return Processes(
            pipeline,
            timeout=timeout,
            threads=threads,
            options=options,
            modules=self.modules,
        )


def _check_numbers(timeout: float, threads: int) -> None:
    """Raise RunError where workers could do nothing in so much time, or with so many threads."""
    if not timeout > 0:
        raise RunError(f"timeout={timeout}; workers wait for each other for seconds above 0")
    if threads < 1:
        raise RunError(f"threads={threads}; a worker computes with at least one thread")


def _npu_as_cpu(pipeline: Pipeline) -> Pipeline:
    """The pipeline with CPU slots in place of those of the kind npu."""
    devices = pipeline.devices
    free = count(1 + max((d.idx for d in devices.values() if d.kind == "cpu"), default=-1))
    found = replace(
        pipeline,
        devices={
            name: Device("cpu", next(free), device.host) if device.kind == "npu" else device
            for name, device in devices.items()
        },
    )
    found.weights, found.origin = pipeline.weights, pipeline.origin
    return found


def _check_devices(pipeline: Pipeline) -> None:
    """Raise DeviceError where this machine lacks a device."""
    for name, device in pipeline.devices.items():
        torch_device(name, device)


def _check_host(pipeline: Pipeline) -> None:
    """Raise LaunchError where slots are of several hosts."""
    hosts = sorted({device.host for device in pipeline.devices.values() if device.host})
    if len(hosts) > 1:
        raise LaunchError(
            f"the pipeline spans the hosts {', '.join(hosts)}; start it with torchrun on each, or "
            "try it on this one with in_process=True (--in-process)"
        )
