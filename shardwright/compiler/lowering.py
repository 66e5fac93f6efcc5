"""Lowering: a graph whose nodes were emitted, as flat calls; a pipeline, as one of kernel calls.

`lower_graph` decides nothing: a call that an emitter did not fill in is an error, and so are
attributes that the kind's schema cannot read.

`lower` puts a ``dfg`` supertask in the place of each ``FX`` one: same names, tensors, devices,
schedule and weights. Equal supertasks are lowered once and share their text as they did; the
lowered pipeline is checked, and says what its tasks no longer tell: whether calls may have fewer
rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from functools import partial
from itertools import count
from pathlib import Path
from typing import overload

import msgspec

from shardwright.compiler.passes.pipeline import prepare
from shardwright.devices import DEVICE_KINDS, DeviceKind
from shardwright.errors import ExecError, InputError
from shardwright.ir import IRGraph, IRNode, IRValue
from shardwright.ir.dynamic import Sizes
from shardwright.ir.execute import describe_node
from shardwright.ir.graph import without_collection
from shardwright.ir.operators import is_built_in
from shardwright.ir.values import Emitted
from shardwright.kernels.emitters import emit_graph
from shardwright.kernels.files import encode
from shardwright.kernels.lowered import LoweredGraph, LoweredOp, ValueSpec, kind_of
from shardwright.kernels.row import ABSENT
from shardwright.pipeline import Bundle, Pipeline, SuperTask, TensorInfo, check
from shardwright.pipeline.fxtext import decode
from shardwright.pipeline.graphs import TaskGraphs, read_text, restated


def lower_graph(graph: IRGraph) -> LoweredGraph:
    """The kernel calls of a graph. Raises ExecError if an emitter left a field empty."""
    values = {value.id: _spec(value) for value in graph.values.values()}
    ops: list[LoweredOp] = []
    checked: set[tuple[int, int, bytes]] = set()
    fresh = count(max(values, default=-1) + 1)
    for node in graph.nodes:
        ops += _lower(node, values, fresh, checked)
    return LoweredGraph(
        graph.name,
        values,
        tuple(ops),
        tuple(graph.inputs),
        tuple(graph.outputs),
        dict(graph.updates),
    )


def _spec(value: IRValue) -> ValueSpec:
    return ValueSpec(
        value.id, value.name, value.shape, value.dtype, value.role, value.strides, value.names
    )


def _lower(
    node: IRNode,
    values: dict[int, ValueSpec],
    fresh: Iterator[int],
    checked: set[tuple[int, int, bytes]],
) -> Iterator[LoweredOp]:
    """The calls of a node; ``values`` grows by what lies between them."""
    if node.emitted is None:
        raise ExecError(f"{describe_node(node)} was not emitted; call emit_graph first")
    ids = [*node.inputs, *node.outputs]
    there = set(range(len(node.inputs)))
    for emitted in node.emitted:
        kind_id, schema, blob = _filled(node, emitted)
        if (kind_id, schema, blob) not in checked:
            kind_of(kind_id).unpack(schema, blob)
            checked.add((kind_id, schema, blob))
        for temp in emitted.temps:
            vid = next(fresh)
            name = f"{node.op.split('.')[1]}.{vid}"
            values[vid] = ValueSpec(vid, name, temp.shape, temp.dtype, "tmp")
            ids.append(vid)
        there.update(emitted.outputs)
        if emitted.constraints or emitted.hints:
            kind = kind_of(kind_id)
            kind.check_constraints(emitted.constraints, emitted.hints, describe_node(node))
        _check_saved(node, emitted, there)
        yield LoweredOp(
            kind_id,
            schema,
            blob,
            tuple(ABSENT if place == ABSENT else ids[place] for place in emitted.inputs),
            tuple(ABSENT if place == ABSENT else ids[place] for place in emitted.outputs),
            describe_node(node),
            emitted.constraints,
            emitted.hints,
            tuple(ids[place] for place in emitted.saved),
        )


def _check_saved(node: IRNode, emitted: Emitted, there: Collection[int]) -> None:
    """Raise ExecError where a call saves what is not ``there``: inputs, and what calls made."""
    for place in emitted.saved:
        if place < 0 or place not in there:
            raise ExecError(
                f"{describe_node(node)}: the emitter saves operand {place}, which no call has made "
                "then; operands count from 0, the node's inputs first"
            )


def _filled(node: IRNode, emitted: Emitted) -> tuple[int, int, bytes]:
    """The three fields that make a call."""
    kind_id, schema, blob = emitted.kind_id, emitted.attr_schema, emitted.attr_blob
    fields = {"kind_id": kind_id, "attr_schema": schema, "attr_blob": blob}
    empty = [name for name, value in fields.items() if value is None]
    if kind_id is None or schema is None or blob is None:
        raise ExecError(f"{describe_node(node)}: the emitter left {', '.join(empty)} empty")
    return kind_id, schema, blob


# --- pipelines -----------------------------------------------------------------------------------


@overload
def lower(pipeline: Pipeline | str | Path) -> Pipeline: ...


@overload
def lower(pipeline: Bundle) -> Bundle: ...


def lower(pipeline: Pipeline | Bundle | str | Path) -> Pipeline | Bundle:
    """The pipeline, given as an object or a file, with its tasks lowered to kernel calls.

    Tasks that are lowered already stay as they are. Of a bundle all pipelines are lowered, and
    those that it makes later. Raises PipelineError if the pipeline is invalid, ExecError if a graph
    cannot be lowered, InputError if the argument is no pipeline.
    """
    if isinstance(pipeline, Bundle):
        lowered = {key: _lower_pipeline(each) for key, each in [*pipeline.pipelines.items()]}
        grow = None if pipeline.grow is None else partial(_grown, pipeline)
        return Bundle(pipeline.shapes, lowered, pipeline.least, grow, pipeline.files)
    return _lower_pipeline(pipeline)


def _grown(bundle: Bundle, sizes: Sizes) -> tuple[Pipeline, Sizes]:
    """A further pipeline of a bundle, lowered, and the least sizes that it runs."""
    return _lower_pipeline(bundle.at(**sizes)), bundle.least[tuple(sizes.values())]


@without_collection()
def _lower_pipeline(pipeline: Pipeline | str | Path) -> Pipeline:
    pipeline = _checked(pipeline)
    texts = _lowered(pipeline)
    shared = [text for text, count in Counter(texts.values()).items() if count > 1]
    names = {text: f"b{i}" for i, text in enumerate(shared)}
    supertasks = {
        name: _task(task, texts.get(name), names) for name, task in pipeline.supertasks.items()
    }
    made = msgspec.structs.replace(
        pipeline,
        supertasks=supertasks,
        tensors=dict(_tensors(pipeline)),
        metadata=msgspec.structs.replace(pipeline.metadata, rows=pipeline.batches()),
        blobs={name: text for text, name in names.items()} or None,
        requires=tuple(sorted(_foreign(set(texts.values())))) or None,
    )
    made.weights = pipeline.weights
    check(made)
    return made


def _checked(pipeline: Pipeline | str | Path) -> Pipeline:
    """The pipeline, known to be right."""
    if isinstance(pipeline, str | Path):
        return Pipeline.load(pipeline)
    if isinstance(pipeline, Pipeline):
        check(pipeline)
        return pipeline
    raise InputError(
        f"lower takes a Pipeline, or the path of its file; found {type(pipeline).__name__}. A "
        "module, a step or a graph becomes one plan by compile"
    )


def _lowered(pipeline: Pipeline) -> dict[str, str]:
    """The lowered text of each supertask that computes, equal ones lowered once."""
    graphs = TaskGraphs(pipeline)
    known: dict[object, str] = {}
    found = {}
    for name, task in pipeline.supertasks.items():
        if task.kind == "dfg":
            found[name] = pipeline.data_of(name)
        elif task.kind == "FX":
            slot = pipeline.devices[task.device or ""]
            kind = DEVICE_KINDS[slot.kind].kernels
            key = kind, graphs.key(name)
            if key not in known:
                # Constants are a supertask's inputs: none may be added, none are known.
                graph = _laid_as_entered(pipeline, name, slot.kind)
                graph = prepare(graph, inference=False, constants=False, device=kind)
                known[key] = encode(lower_graph(emit_graph(graph)))
            found[name] = known[key]
    return found


def _laid_as_entered(pipeline: Pipeline, name: str, device: DeviceKind) -> IRGraph:
    """A supertask's graph on inputs that lie as their entries say, as kernels are given them.

    An ``FX`` task reads what another makes as that lies, though elements lie on one another, which
    no entry says; strides of its views follow from it.
    """
    infos = [pipeline.tensors[tensor] for tensor in pipeline.supertasks[name].inputs]
    return decode(restated(pipeline.data_of(name), infos, device).data, infos, name=name)


def _task(task: SuperTask, text: str | None, names: dict[str, str]) -> SuperTask:
    if text is None:
        return task
    blob = names.get(text)
    data = text if blob is None else None
    return msgspec.structs.replace(task, kind="dfg", data=data, data_blob=blob)


def _tensors(pipeline: Pipeline) -> Iterator[tuple[str, TensorInfo]]:
    """The tensors; constants fill placeholders that are named by their place."""
    connections = pipeline.connections
    for name, info in pipeline.tensors.items():
        if info.value is None:
            yield name, info
            continue
        first = pipeline.supertasks[connections.users[name][0]]
        place = first.inputs.index(name)
        value = msgspec.structs.replace(info.value, name_in_graph=f"i{place}")
        yield name, msgspec.structs.replace(info, value=value)


def _foreign(texts: set[str]) -> set[str]:
    """The operators that the texts call and that torch does not bring."""
    return {op for text in texts for op in read_text("dfg", text).operators if not is_built_in(op)}
