"""`profile`: measure each layer of a graph alone.

Input: a graph, of a model or of a training step, and how finely it is to be seen. Output: a
`Profile`. Invariant: equal layers are measured once; what was measured on this machine
before is not measured again; nothing of the caller's is written to.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import torch

from shardwright.autodiff.needed import needing_gradients, trained_parameters
from shardwright.costs.granularity import BasicBlocks, Unit, unit_graph, units
from shardwright.costs.measurement import (
    Cache,
    Measurement,
    Timing,
    call_key,
    unit_key,
    wants_gradients,
)
from shardwright.costs.profile import MEGABYTE, Layer, Profile
from shardwright.costs.roofline import NodeWork, node_work
from shardwright.errors import ProfileError
from shardwright.ir import IRGraph
from shardwright.ir.graph import forward_nodes
from shardwright.ir.tensor_meta import MILLISECOND
from shardwright.profiling.machine import model_name, present_device
from shardwright.profiling.measure import Settings, check_counts, measure
from shardwright.tracing import capture


def profile(
    graph: IRGraph,
    *,
    depth: int | None = None,
    basic_blocks: BasicBlocks = (),
    n_iter: int = 10,
    recompute: bool = False,
    device: str | torch.device = "cpu",
    threads: int = 1,
    cache: bool | str | Path = True,
) -> Profile:
    """Measure each layer of a graph alone, forward and backward.

    graph
        The graph of a model, whose parameters are all treated as trained, or of a training step, of
        which the forward is measured.
    depth
        Depth in the tree of modules: 0 is the whole graph, 1 the modules that the model consists
        of, and so on; None is every operator by itself.
    basic_blocks
        Classes of modules, or their names, that are measured whole wherever they occur.
    n_iter
        Number of samples, of which the times are medians.
    recompute
        Whether the backward runs the forward again instead of keeping saved tensors.
    device, threads
        ``cpu`` or ``cuda:0``, and the number of threads of torch.
    cache
        Where measurements are cached: True for the user's cache directory, a path, or False.

    Tensors have the model's contents if there are any, random ones otherwise. The caller's
    parameters, gradients, buffers and random number generators do not change. Raises DeviceError,
    and ProfileError that names the node, its source line and the reason if one cannot be measured.
    """
    _check(graph, n_iter=n_iter, threads=threads)
    place = present_device(device)
    settings = Settings(place, threads, n_iter)
    kept = Cache.of(cache, f"{model_name(place)}, torch {torch.__version__}, threads {threads}")
    found = units(graph, forward_nodes(graph), depth=depth, basic_blocks=basic_blocks)
    wanted = needing_gradients(graph, trained_parameters(graph))
    try:
        return _Profiling(graph, wanted, settings, kept, recompute).of(found)
    finally:
        kept.save()


def profile_network(
    net: torch.nn.Module,
    sample_batch: Any,
    kwargs: dict[str, Any] | None = None,
    basic_blocks: BasicBlocks = (),
    max_depth: int = 100,
    n_iter: int = 10,
) -> Profile:
    """Capture a model and profile its layers ``max_depth`` modules down (the specification's
    function).

    ``sample_batch`` is the model's argument, or a tuple of them. Raises CaptureError and the errors
    of `profile`.
    """
    args = sample_batch if isinstance(sample_batch, tuple) else (sample_batch,)
    graph = capture(net, args, kwargs or {})
    return profile(graph, depth=max_depth, basic_blocks=basic_blocks, n_iter=n_iter)


def _check(graph: object, **counts: int) -> None:
    if not isinstance(graph, IRGraph):
        raise ProfileError(
            f"a graph is profiled, found a {type(graph).__name__}; capture it first: "
            "profile(capture(model, args)), or profile_network(model, sample)"
        )
    check_counts(**counts)


class _Profiling:
    """Profiles the units of one graph."""

    def __init__(
        self,
        graph: IRGraph,
        wanted: Collection[int],
        settings: Settings,
        cache: Cache,
        recompute: bool,
    ) -> None:
        self._graph = graph
        self._wanted = wanted
        self._settings = settings
        self._cache = cache
        self._recompute = recompute
        self._measurements: dict[str, Measurement] = {}

    def of(self, found: Sequence[Unit]) -> Profile:
        """The profile of some units."""
        layers = tuple(self._layer(unit) for unit in found)
        return Profile(
            graph=self._graph.name,
            device=model_name(self._settings.device),
            kind="cuda" if self._settings.device.type == "cuda" else "cpu",
            torch_version=str(torch.__version__),
            threads=self._settings.threads,
            recompute=self._recompute,
            layers=layers,
            measurements=self._measurements,
        )

    def _layer(self, unit: Unit) -> Layer:
        alone = unit_graph(self._graph, unit)
        key = unit_key(alone, self._wanted)
        if key not in self._measurements:
            calls = tuple(call_key(alone, node, self._wanted) for node in alone.nodes)
            self._measurements[key] = Measurement(
                self._timing(key, alone), calls, self._work(alone)
            )
        timing = self._measurements[key].timing
        backward = timing.backward + timing.weight
        if self._recompute and any(map(wants_gradients, self._measurements[key].calls)):
            backward += timing.forward
        return Layer(
            unit.name,
            unit.kind,
            tuple(node.id for node in unit.nodes),
            key,
            forward_time=timing.forward / MILLISECOND,
            backward_time=backward / MILLISECOND,
            **_megabytes(alone),
            **_memory(timing, recompute=self._recompute),
        )

    def _work(self, alone: IRGraph) -> NodeWork | None:
        """What a unit of one node gives a device to do."""
        one = alone.nodes[0] if len(alone.nodes) == 1 else None
        return node_work(alone, one, self._wanted) if one is not None else None

    def _timing(self, key: str, alone: IRGraph) -> Timing:
        found = self._cache.find(key, self._settings.samples)
        if found is None:
            found = measure(alone, self._wanted, self._settings)
            self._cache.add(key, found)
        return found


def _megabytes(alone: IRGraph) -> dict[str, float]:
    """The sizes of what a unit reads and gives."""
    read = dict.fromkeys(value_id for node in alone.nodes for value_id in node.inputs)
    stored = [v for v in read if alone.values[v].is_stored]
    sizes = {"layer_size": stored, "input_size": alone.inputs, "output_size": alone.outputs}
    return {
        name: sum(alone.values[v].nbytes for v in value_ids) / MEGABYTE
        for name, value_ids in sizes.items()
    }


def _memory(timing: Timing, *, recompute: bool) -> dict[str, float]:
    """What a run needs: a forward that is run again counts with the backward."""
    forward, backward = timing.memory_kept, timing.memory_backward
    if recompute:
        forward, backward = timing.memory, timing.memory_again
    return {"memory_forward": forward / MEGABYTE, "memory_backward": backward / MEGABYTE}
