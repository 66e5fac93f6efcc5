"""`compile`: a model or a training step as one bound plan for each set of shapes.

    program = sw.compile(model, x)
    y = program(x)                      # as model(x)
    outputs = program.run({"x": x})     # by name

A call of the shapes of the one before costs no more than looking at them; other shapes get a
capture of their own, up to a bound; the least lately used goes first, and what it trained stays,
since the tensors are the program's. A result is memory of its own, unless the slots are asked for;
weights are the program's own tensors, and what a step trains is there when the call returns. Calls
from several threads wait for one another. A call computes with the program as it is then: what has
changed since it was captured (`guards`) is prepared anew.
"""

from __future__ import annotations

import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.compiler.bind import Binder, BoundPlan
from shardwright.compiler.feeds import check_device
from shardwright.compiler.guards import Facts, Guard, GuardedParts, is_placed
from shardwright.compiler.memory.plan import ExecPlan
from shardwright.compiler.replay import Replaying, check_count, take_feed
from shardwright.compiler.sources import Prepared, Source, source_of
from shardwright.compiler.trace import Trace, check_trace, trace_of
from shardwright.errors import DeviceError, ExecError, InputError
from shardwright.ir import IRGraph, IRValue
from shardwright.ir.structure import leaves, rebuild, rebuild_call
from shardwright.ir.tensor_meta import torch_dtype

OFTEN = 8
"""How many states of its modules and optimizers a program is captured for before that is said."""

DEVICES = ("cpu", "cuda")

Bind = Callable[[Prepared, Replaying], BoundPlan]


def compile(
    program: nn.Module | IRGraph | Callable[..., Any],
    *example_args: Any,
    device: str | torch.device | None = None,
    threads: int | None = None,
    replay: Replaying | None = None,
    seed: int = 0,
    **example_kwargs: Any,
) -> CompiledProgram:
    """Compile a model or a training step for one device; the result is called like the original.

    program
        A module, compiled for inference; a training step function (as for `train`), compiled to one
        plan of forward, backward and update; or a graph.
    example_args, example_kwargs
        Arguments of a call. Their shapes, dtypes and structure matter, not their contents. Calls
        with other shapes are captured when they come. Without an example, the first call is.
    device
        ``cpu`` or ``cuda``; by default the device of the program's parameters.
    threads
        Number of threads of native kernels; by default as many as torch.
    replay
        Roles, and the number of captures kept.
    seed
        Seed of the dropout of a step.

    Parameters, buffers and optimizer state are used in place: a step trains the program's own. The
    next call notices changes of the program: weights changed in place or replaced, ``train`` and
    ``eval``, plain attributes of modules, hyper-parameters. After writes through ``.data`` or
    NumPy, and other changes in Python, call ``refresh()``.

    Calls from several threads are safe, but wait for one another.

    Raises CaptureError if the program cannot be captured, DeviceError, WeightError, and PlanError
    or GraphError if a step cannot be differentiated.
    """
    source = source_of(program, seed)
    chosen = _device(source, device, (*example_args, *example_kwargs.values()))
    if not isinstance(replay, Replaying | None):
        raise ExecError(f"replay={replay!r}; give a sw.Replaying, such as sw.Replaying(bound=2)")
    replaying = (replay or Replaying()).of_mode(source.mode)
    if threads is not None:
        check_count("threads", threads, 1)
    made = CompiledProgram(source, Binder(chosen, threads), chosen, replaying)
    if example_args or example_kwargs or _takes_nothing(source):
        made.capture(*example_args, **example_kwargs)
    return made


def _takes_nothing(source: Source) -> bool:
    """Whether a call of the program has no arguments, so that nothing is needed to capture it."""
    try:
        arguments, _ = source.describe((), {})
    except InputError:
        return False
    return not arguments.parameters


class CompiledProgram:
    """A compiled model or training step, called like the original; `compile` makes it."""

    def __init__(
        self, source: Source, bind: Bind, device: torch.device, replaying: Replaying
    ) -> None:
        self.device = device
        self.replaying = replaying.of_mode(source.mode)
        self._source = source
        self._bind = bind
        self._captures: OrderedDict[Hashable, Capture] = OrderedDict()
        """By the structure of the call, what guards know, and its tensors' names and metas."""
        self._latest: Capture | None = None
        self._lock = threading.RLock()
        self._modes: set[str] = set()

    # --- calls ------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run a call of the original. Raises InputError, CaptureError for what has no graph."""
        with self._lock:
            latest = self._latest
            if latest is not None and latest.is_like_last(args, kwargs) and latest.guard.holds():
                return latest.fold(latest.run(args))
            capture, tensors = self._found(args, kwargs)
            return capture.fold(capture.run(tensors))

    def run(self, feed: Mapping[str, Tensor], *, slots: bool = False) -> dict[str, Tensor]:
        """Run on tensors by name; return the outputs by name.

        Inputs have the names of the original's arguments; learning rates may be passed by the names
        of `rates`. Roles of the feed that the replay does not read are ignored. With ``slots`` the
        outputs are the program's own memory, which the next run overwrites.

        Raises InputError for an unknown name, a missing input, another dtype or device.
        """
        with self._lock:
            latest = self._some()
            specs, names = latest.feed_specs, latest.prepared.names
            found = take_feed(feed, specs, self.replaying, self.device, optional=latest.rates)
            tensors: Sequence[Tensor] = [found[name] for name in names]
            others = any(found[name].shape != specs[name].shape for name in names)
            if others or not latest.guard.holds():
                call = rebuild_call(latest.prepared.arguments, tensors)
                latest, tensors = self._found(call.args, call.kwargs)
            if stored := {name: t for name, t in found.items() if specs[name].role != "input"}:
                latest.bound.feed(stored)
            rates = {name: found[name] for name in latest.rates if name in found}
            results = latest.run(tensors, rates=rates, slots=slots)
            return dict(zip(latest.prepared.graph.output_names, results, strict=True))

    def trace(self, *args: Any, **kwargs: Any) -> Trace:
        """Run a call of the original and return the kernel calls that were executed, in order.

        For a CUDA graph these are the calls made when it was recorded. Raises ExecError if they are
        not the plan's, in number or order.
        """
        with self._lock:
            capture, tensors = self._found(args, kwargs)
            with capture.bound.logging() as log:
                capture.run(tensors)
        found = trace_of(capture.bound.plan, log)
        check_trace(capture.bound.plan, found)
        return found

    def capture(self, *args: Any, **kwargs: Any) -> None:
        """Prepare for calls like this one, without running."""
        with self._lock:
            self._found(args, kwargs)

    def refresh(self) -> None:
        """Capture again, and pack and fold the current weights again.

        Needed after changes that a call does not notice: writes to weights through ``.data`` or
        NumPy, attributes that are not plain values, and variables that a step reads.
        """
        with self._lock:
            for capture in self._captures.values():
                capture.refresh()

    # --- what it is -------------------------------------------------------------------------

    @property
    def plan(self) -> ExecPlan:
        """The execution plan of the latest capture."""
        return self._some().bound.plan

    @property
    def graph(self) -> IRGraph:
        """The graph of the latest capture, before any pass."""
        return self._some().prepared.graph

    @property
    def rates(self) -> tuple[str, ...]:
        """The names of the learning rates that `run` accepts."""
        return self._some().rates

    @property
    def captures(self) -> int:
        """The number of captures kept."""
        return len(self._captures)

    def __str__(self) -> str:
        return str(self.plan) if self._latest else "a program without a capture yet; call it first"

    # --- inside -----------------------------------------------------------------------------

    def _found(
        self, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[Capture, Sequence[Tensor]]:
        """The capture of a call, made where there is none, and the call's tensors."""
        arguments, tensors = self._source.describe(args, kwargs)
        feed = {leaf.name: t for leaf, t in zip(leaves(arguments), tensors, strict=True)}
        self._check(feed)
        metas = tuple((name, t.shape, t.dtype, t.device) for name, t in feed.items())
        key = repr(arguments), self._facts(), metas  # as text 1, 1.0 and True differ
        like = [(t.shape, t.dtype) for t in tensors]

        def prepare() -> Prepared:
            examples = [
                torch.zeros(shape, dtype=dtype, device=self.device) for shape, dtype in like
            ]
            call = rebuild_call(arguments, examples)
            return self._source.prepare(call.args, call.kwargs, self.device)

        captures = self._captures
        if key not in captures:
            source, bind = self._source, self._bind
            made = Capture(prepare, source.parts, self.replaying, bind, self.device)
            while len(captures) >= self.replaying.bound:
                captures.popitem(last=False)
            captures[key] = made
        captures.move_to_end(key)
        self._latest = captures[key]
        self._latest.follow()
        plain = not kwargs and len(args) == len(tensors)
        plain = plain and all(isinstance(item, Tensor) for item in args)
        self._latest.remember(args, tensors, plain=plain)
        return self._latest, tensors

    def _facts(self) -> str:
        """What a capture depends on beside the arguments, as the program is now."""
        latest = self._latest
        if latest is not None and latest.guard.facts.hold() and latest.guard.has_same_objects():
            return latest.guard.facts.key
        facts = Facts(self._source.parts()).key
        self._modes.add(facts)
        if len(self._modes) == OFTEN:
            warnings.warn(
                f"a compiled program was captured for the {OFTEN}th time because attributes of its "
                "modules, or an optimizer's hyper-parameters, had changed; each takes as long as "
                "the first. What changes from call to call is better an input",
                RuntimeWarning,
                stacklevel=4,
            )
        return facts

    def _check(self, feed: Mapping[str, Tensor]) -> None:
        """Raise InputError where a call's tensors are of another dtype or device."""
        for name, tensor in feed.items():
            check_device(f"input {name!r}", tensor, self.device)
        if self._latest is not None:
            specs = self._latest.feed_specs
            if all(name in specs for name in feed):
                take_feed(feed, specs, self.replaying, self.device, optional=specs)

    def _some(self) -> Capture:
        if self._latest is None:
            raise InputError(
                "the program was not captured yet, as it was compiled without examples; call it "
                "first, or its capture, with the arguments of a call"
            )
        return self._latest


# --- captures ------------------------------------------------------------------------------------


class Capture:
    """One capture of a program: what is prepared for one set of shapes, and bound.

    Where preparing or binding anew fails, the capture is what it was.
    """

    def __init__(
        self,
        prepare: Callable[[], Prepared],
        parts: Callable[[], GuardedParts],
        replaying: Replaying,
        bind: Bind,
        device: torch.device,
    ) -> None:
        self._prepare = prepare
        self._parts = parts
        self._replaying = replaying
        self._bind = bind
        self._device = device
        self._signature: list[tuple[torch.Size, torch.dtype, torch.device]] = []
        self._positional: int | None = None
        self.refresh()

    def refresh(self) -> None:
        """Prepare and bind anew: tensors may be others, and what was made of them with them."""
        facts = Facts(self._parts())
        with self._outside_of_modes():
            prepared = self._prepare()
            parts = self._parts()
            guard = Guard(parts, facts, read_tensors(prepared.graph, self._replaying, parts))
            bound = self._bind(prepared, self._replaying)
        self.prepared, self.bound, self.guard = prepared, bound, guard
        graph, given = prepared.graph, prepared.rate_inputs
        ordered = [*prepared.call_inputs, *given]
        places = [ordered.index(value_id) for value_id in graph.inputs]
        self._places = None if places == sorted(places) else places
        rates = [graph.values[value_id] for value_id in given]
        self.rates = tuple(value.name for value in rates)
        self._rate_tensors = [
            torch.empty(value.shape, dtype=torch_dtype(value.dtype), device=self._device)
            for value in rates
        ]
        self._rate_values: dict[str, float] = {}
        self.feed_specs = _feed_specs(prepared)

    @contextmanager
    def _outside_of_modes(self) -> Iterator[None]:
        """Outside of the modes that a caller may be in, which would be those of later calls."""
        with torch.autocast(self._device.type, enabled=False), torch.inference_mode(False):
            yield

    def remember(self, args: Sequence[Any], tensors: Sequence[Tensor], *, plain: bool) -> None:
        """From now on calls like this one take the fast path, if it is ``plain``."""
        self._signature = [(tensor.shape, tensor.dtype, tensor.device) for tensor in tensors]
        self._positional = len(args) if plain else None

    def is_like_last(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Whether a call is plainly one of this capture's: the same tensors alone, in order."""
        if kwargs or len(args) != self._positional:
            return False
        for given, (shape, dtype, device) in zip(args, self._signature, strict=True):
            if not isinstance(given, Tensor) or given.shape != shape:
                return False
            if given.dtype != dtype or given.device != device or given.layout != torch.strided:
                return False
        return True

    def run(
        self,
        tensors: Sequence[Tensor],
        *,
        rates: Mapping[str, Tensor] | None = None,
        slots: bool = False,
    ) -> list[Tensor]:
        """Run once; gives the graph's outputs, in order."""
        self.prepared.begin()
        if self.rates:
            tensors = [*tensors, *self._rates_of_step(rates or {})]
        if self._places is not None:
            tensors = [tensors[place] for place in self._places]
        if torch.is_autocast_enabled(self._device.type):
            with torch.autocast(self._device.type, enabled=False):
                results = self.bound(tensors, slots=slots)
        else:
            results = self.bound(tensors, slots=slots)
        if self.prepared.rates is not None:
            self.prepared.rates.advance()
        return results

    def fold(self, results: Sequence[Tensor]) -> Any:
        """The graph's outputs as the program's own result."""
        assert self.prepared.graph.out_structure is not None
        return rebuild(self.prepared.graph.out_structure, results)

    def follow(self) -> None:
        """Be of the program as it is now: packed, folded or prepared anew where it has changed."""
        if not self.guard.has_same_objects():
            self.refresh()
        elif not self.guard.has_same_contents():
            versions = self.guard.versions()
            if not self.bound.take_contents():
                with self._outside_of_modes():
                    self.bound = self._bind(self.prepared, self._replaying)
            self.guard.took(versions)

    def _rates_of_step(self, given: Mapping[str, Tensor]) -> list[Tensor]:
        """The learning rates as the graph takes them, written where one has changed."""
        assert self.prepared.rates is not None
        values = self.prepared.rates.values
        if values != self._rate_values:
            for name, tensor in zip(self.rates, self._rate_tensors, strict=True):
                tensor.fill_(values[name])
            self._rate_values = values
        pairs = zip(self.rates, self._rate_tensors, strict=True)
        return [given.get(name, tensor) for name, tensor in pairs] if given else self._rate_tensors


def read_tensors(graph: IRGraph, replaying: Replaying, parts: GuardedParts) -> list[Tensor]:
    """The tensors whose contents binding takes: what the program itself changes are none.

    In training these are the constants, which are folded. In inference all tensors of the modules
    count: a batch norm writes to its statistics unseen, but counts its batches.
    """
    stored = [value for value in graph.stored() if value.id not in graph.updates]
    if replaying.mode == "train":
        return [graph.tensors[value.id] for value in stored if value.role == "constant"]
    written = {graph.tensors[value_id].data_ptr() for value_id in graph.updates}
    held = (t for m in parts.modules for t in (*m.parameters(), *m.buffers()))
    others = [t for t in held if is_placed(t) and t.data_ptr() not in written]
    return [*(graph.tensors[value.id] for value in stored), *others]


def _feed_specs(prepared: Prepared) -> dict[str, IRValue]:
    """What a feed may name: stored values, the call's tensors, and the rates."""
    graph = prepared.graph
    found = {name: value for value in graph.stored() for name in value.names}
    pairs = zip(prepared.names, prepared.call_inputs, strict=True)
    found |= {name: graph.values[value_id] for name, value_id in pairs}
    rates = (graph.values[value_id] for value_id in prepared.rate_inputs)
    return found | {value.name: value for value in rates}


# --- devices -------------------------------------------------------------------------------------


def _device(
    source: Source, device: str | torch.device | None, examples: tuple[Any, ...]
) -> torch.device:
    """Where a program runs. Raises DeviceError."""
    if device is None:
        tensors = [*source.tensors(), *(item for item in examples if isinstance(item, Tensor))]
        chosen = tensors[0].device if tensors else torch.device("cpu")
    else:
        chosen = parsed(device)
    return available(torch.device("cpu") if chosen.type == "meta" else chosen)


def parsed(device: str | torch.device) -> torch.device:
    """A device by its name. Raises DeviceError."""
    try:
        return torch.device(device)
    except (RuntimeError, TypeError):
        raise DeviceError(
            f"device={device!r} is no device; a program is compiled for one of {', '.join(DEVICES)}"
        ) from None


def available(chosen: torch.device) -> torch.device:
    """The device with its number, if this machine has it. Raises DeviceError."""
    if chosen.type not in DEVICES:
        raise DeviceError(
            f"a program is compiled for one of {', '.join(DEVICES)}, found {chosen.type!r}"
        )
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise DeviceError(
            f"device={str(chosen)!r}, but this machine has no CUDA device; compile for the cpu, or "
            "run it where one is"
        )
    if chosen.type == "cuda" and chosen.index is None:
        chosen = torch.device("cuda", torch.cuda.current_device())
    return chosen
