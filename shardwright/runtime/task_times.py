"""`profile_tasks`: what each compute supertask of a pipeline takes on this machine.

Input: a pipeline, of a model or of a training step. Output: `TaskTimes`. Each slot runs the
programs of its supertasks one after another, round after round, in the process and in the way in
which it runs them in a call: compiled, writing over what they may, on tensors like those of the
pipeline. A round is a small step: several microbatches, each on tensors that the one before it did
not leave in caches, and one update, which drives out what it does not touch. All slots do so at the
same time, as long as the slowest needs; so the times have in them that the slots share a machine.

Invariant: supertasks of one slot that share a program are measured once; the contents of
the pipeline stay as they are.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from shardwright.compiler.tasks import TaskProgram
from shardwright.costs.tasks import TaskTime, TaskTimes, fingerprint_tasks
from shardwright.engine.slot import LoadedSlot, Run
from shardwright.engine.walk import SlotTask
from shardwright.errors import ProfileError
from shardwright.ir.tensor_meta import torch_dtype
from shardwright.launch.protocol import EngineOptions
from shardwright.pipeline import Document, Pipeline
from shardwright.pipeline.graphs import TaskGraphs
from shardwright.profiling.contents import contents
from shardwright.profiling.memory import Peak, peak_bytes
from shardwright.runtime.driver import Driver, Start, checked

MEASURE = f"{__name__}:measure_slot"
WARM_UP = 2
"""Rounds before those that count."""
MICROBATCHES = 4
"""The most microbatches of a round: with more of them an update weighs little."""
SETS = 2
"""How many microbatches' tensors there are, used in turn."""
ONCE = ("prepare", "update")
"""The phases of what runs once a step."""
BLOCK = 16 << 20
"""Bytes; larger ones might come from the system and go back to it."""


class MeasuringOrder(msgspec.Struct, frozen=True):
    """What a slot is to do: the pipeline's text, and for how many rounds and seconds at least."""

    document: bytes
    rounds: int
    seconds: float = 0.0


def profile_tasks(
    pipeline: Pipeline | str | Path,
    threads: int = 1,
    *,
    n_iter: int = 10,
    in_process: bool = False,
    modules: Sequence[str] = (),
    timeout: float = 600.0,
) -> TaskTimes:
    """Measure every compute task of a pipeline; the times are means of ``n_iter`` rounds.

    ``in_process`` measures one device after another in this process, each with the machine to
    itself. ``threads`` and ``modules`` are those of `Runner`; ``timeout`` is the number of seconds
    for measuring all devices. Raises the errors of starting a `Runner`; ProfileError for ``n_iter``
    below 1.
    """
    if type(n_iter) is not int or n_iter < 1:
        raise ProfileError(f"n_iter is a number from 1 up, found {n_iter!r}")
    prepared = checked(pipeline, modules)
    start = Start(in_process=in_process, modules=modules)
    backend = start(prepared, EngineOptions(threads), timeout)
    with Driver(prepared, start, backend, 1) as driver:
        return times_on(driver, n_iter, together=not in_process)


def times_on(driver: Driver, n_iter: int = 10, *, together: bool = True) -> TaskTimes:
    """`profile_tasks` on slots that run already, between the calls of a `TrainingRunner`, say.

    Where slots run ``together``, each goes on as long as the slowest needs.
    """
    longest = times_of_rounds(driver, 1)[1] if together else 0.0
    return times_of_rounds(driver, n_iter, longest * n_iter)[0]


def times_of_rounds(driver: Driver, rounds: int, seconds: float = 0.0) -> tuple[TaskTimes, float]:
    """Times by so many rounds on each slot, or by as many as take so many seconds.

    Beside them are the seconds of a round of the slowest slot.
    """
    order = MeasuringOrder(driver.pipeline.to_json(), rounds, seconds)
    found = driver.call_workers(MEASURE, msgspec.to_builtins(order))
    tasks = {
        task: TaskTime(*numbers)
        for slot in driver.pipeline.devices
        for task, numbers in found[slot]["tasks"].items()
    }
    longest = max(of_slot["round"] for of_slot in found.values())
    return TaskTimes(tasks, fingerprint_tasks(driver.pipeline)), longest


def measure_slot(slot: LoadedSlot, arguments: Any, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """On a slot: seconds and bytes of each of its supertasks, and seconds of a round of all."""
    del tensors
    order = msgspec.convert(arguments, MeasuringOrder)
    document = msgspec.json.decode(order.document, type=Document)
    with torch.random.fork_rng(devices=[slot.device] if slot.device.type == "cuda" else []):
        return _Measuring(slot, document).over(order)


def small_step(document: Document, numbers: Mapping[str, int]) -> list[int]:
    """The programs of a round: those of a microbatch several times, the others once.

    ``numbers`` is the program of each supertask, in the order of the file.
    """
    cut = document.training.microbatches if document.training is not None else None
    once: dict[str, dict[int, None]] = {phase: {} for phase in ONCE}
    each: dict[int, None] = {}
    for task, number in numbers.items():
        once.get(document.supertasks[task].phase or "", each)[number] = None
    again = min(cut.n, MICROBATCHES) if cut is not None else 1
    return [*once["prepare"], *[*each] * again, *once["update"]]


@dataclass(slots=True)
class _MeasuredTask:
    """A program, the inputs that it reads in turn, and what it made last."""

    run: Run
    inputs: Sequence[list[Tensor]]
    runs: int = 0
    made: Sequence[Tensor] = ()

    def next_inputs(self) -> list[Tensor]:
        """Those of the next run."""
        self.runs += 1
        return self.inputs[self.runs % len(self.inputs)]


def _needs(run: Run, peak: Peak) -> tuple[int, int]:
    """The temporary and the kept bytes of a program whose run took so much."""
    temporary = peak.most - peak.left
    if isinstance(run, TaskProgram):
        return temporary + run.plan.memory_bytes, run.kept_bytes
    return temporary, 0


class _Measuring:
    """The distinct programs of a slot, by number, each with inputs of its own."""

    def __init__(self, slot: LoadedSlot, document: Document) -> None:
        self._slot = slot
        self._document = document
        self._graphs = TaskGraphs(document)
        self._programs: list[_MeasuredTask] = []
        self._numbers: dict[str, int] = {}
        known: dict[int, int] = {}
        for task in slot.program.tasks:
            if task.does == "compute":
                run = slot.tasks[task.name].program
                number = known.setdefault(id(run), len(self._programs))
                if number == len(self._programs):
                    self._programs.append(_MeasuredTask(run, self._inputs_of(task)))
                self._numbers[task.name] = number
        self._order = small_step(document, self._numbers)

    def over(self, order: MeasuringOrder) -> dict[str, Any]:
        """Run round after round, and say what was found."""
        peaks = [self._peak(program) for program in self._programs]
        self._make_room(max((peak.most for peak in peaks), default=0))
        for _ in range(WARM_UP):
            self._round([[] for _ in self._programs])
        samples: list[list[float]] = [[] for _ in self._programs]
        end = time.perf_counter() + order.seconds
        rounds = 0
        while rounds < order.rounds or time.perf_counter() < end:
            self._round(samples)
            rounds += 1
        seconds = [statistics.fmean(found) for found in samples]
        needs = [
            _needs(program.run, peak) for program, peak in zip(self._programs, peaks, strict=True)
        ]
        tasks = {task: (seconds[i], *needs[i]) for task, i in self._numbers.items()}
        return {"round": sum(seconds[i] for i in self._order), "tasks": tasks}

    def _round(self, samples: Sequence[list[float]]) -> None:
        """Run the programs of a round in their order; note the seconds of each run."""
        for number in self._order:
            program = self._programs[number]
            inputs = program.next_inputs()
            self._wait()
            start = time.perf_counter()
            with torch.no_grad():
                made = program.run(inputs)
            self._wait()
            samples[number].append(time.perf_counter() - start)
            program.made = made

    def _wait(self) -> None:
        """Until the device has done what it was given."""
        if self._slot.device.type == "cuda":
            torch.cuda.synchronize(self._slot.device)

    def _peak(self, program: _MeasuredTask) -> Peak:
        """The most bytes beyond a program's inputs, and what it leaves."""
        inputs = program.next_inputs()
        with torch.no_grad():
            return peak_bytes(lambda: program.run(inputs), self._slot.device)

    def _make_room(self, nbytes: int) -> None:
        """Leave so many bytes free behind what is held, as the microbatches of a step do.

        A worker keeps such memory; what comes from the system instead is slow to touch at first.
        """
        if self._slot.device.type == "cpu":
            blocks = [torch.empty(BLOCK, dtype=torch.uint8) for _ in range(nbytes // BLOCK + 2)]
            del blocks

    def _inputs_of(self, task: SlotTask) -> list[list[Tensor]]:
        """The inputs of a supertask for a microbatch and for the next, or those of the step.

        They are the slot's constants, but for those that the program overwrites; of these each
        microbatch gets the same, as in a step, and of all others its own.
        """
        written = task.writes
        shared = {name: x for name, x in self._slot.constants.items() if name not in written}
        sets: list[list[Tensor]] = []
        once = self._document.supertasks[task.name].phase in ONCE
        for _ in range(1 if once else SETS):
            drawn = zip(task.inputs, self._drawn(task), strict=True)
            found = {name: shared.get(name, tensor) for name, tensor in drawn}
            shared |= {name: found[name] for name in written}
            sets.append([found[name] for name in task.inputs])
        return sets

    def _drawn(self, task: SlotTask) -> list[Tensor]:
        """Tensors like a supertask's inputs, with contents that its operators can read."""
        device, document = self._slot.device, self._document
        if document.supertasks[task.name].kind == "FX":
            graph = self._graphs.of(task.name)
            return contents(graph, graph.inputs, device)
        # A lowered one does not say what its integers are: zero is an index into anything.
        infos = [document.tensors[name] for name in task.inputs]
        like = [(info, torch_dtype(info.dtype)) for info in infos]
        return [
            torch.rand(info.shape, device=device).to(dtype)
            if dtype.is_floating_point
            else torch.zeros(info.shape, dtype=dtype, device=device)
            for info, dtype in like
        ]
