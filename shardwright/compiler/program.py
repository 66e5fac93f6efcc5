"""CompiledProgram: a model or a training step as one bound plan for each set of shapes.

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
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwright.compiler.captured import Bind, Capture
from shardwright.compiler.guards import Facts
from shardwright.compiler.memory.plan import ExecPlan
from shardwright.compiler.replay import Replaying, check_device, take_feed
from shardwright.compiler.sources import Prepared, Source
from shardwright.compiler.trace import Trace, check_trace, trace_of
from shardwright.errors import InputError
from shardwright.ir import IRGraph
from shardwright.ir.structure import leaves, rebuild_call

OFTEN = 8
"""How many states of its modules and optimizers a program is captured for before that is said."""


class CompiledProgram:
    """A compiled model or step; `compile` makes it. Called like the original."""

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
        """Run on tensors by name; gives the outputs by name.

        Inputs have the names of the original's arguments; learning rates may be fed too, by the
        names of `rates`. What of the feed the replay does not take (`Replaying`) is ignored. With
        ``slots`` the outputs are the program's memory, which the next run overwrites.

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
        """Run a call of the original; gives what was really called, in order.

        A CUDA graph's calls are those that were made when it was recorded.
        Raises ExecError where they are not the plan's, in number or order.
        """
        with self._lock:
            capture, tensors = self._found(args, kwargs)
            with capture.bound.logging() as log:
                capture.run(tensors)
        found = trace_of(capture.bound.plan, log)
        check_trace(capture.bound.plan, found)
        return found

    def capture(self, *args: Any, **kwargs: Any) -> None:
        """Make ready for calls like this one, without running."""
        with self._lock:
            self._found(args, kwargs)

    def refresh(self) -> None:
        """Capture anew: the program, and what was made of its weights (packed, folded), as now.

        Needed after changes that a call does not notice: of weights through ``.data`` or NumPy, of
        attributes that are no plain values, and of variables that a step reads.
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
        """The names of the learning rates, which `run` may be fed."""
        return self._some().rates

    @property
    def captures(self) -> int:
        """How many captures are kept."""
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
            check_device(name, tensor, self.device)
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
