"""`lower`: a pipeline whose supertasks hold operators, as one whose supertasks hold kernel calls.

Comes in: a pipeline of ``FX`` supertasks, or its file. Goes out: the same pipeline with a ``dfg``
supertask in the place of each: same names, tensors, devices, schedule and weights. What always
holds: equal supertasks are lowered once and share their text as they did; the lowered pipeline is
checked, and says what its tasks no longer tell: whether calls may have fewer rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import msgspec

from shardwright.compiler.lowering import lower_graph
from shardwright.compiler.passes.pipeline import prepare
from shardwright.errors import InputError
from shardwright.ir import IRGraph
from shardwright.ir.graph import without_collection
from shardwright.ir.operators import is_built_in
from shardwright.kernels.emitters import emit_graph
from shardwright.kernels.files import encode
from shardwright.pipeline import Pipeline, SuperTask, TensorInfo, check
from shardwright.pipeline.fxtext import decode
from shardwright.pipeline.graphs import TaskGraphs, read_text
from shardwright.pipeline.proof import restated
from shardwright.pipeline.schema import DeviceKind, Metadata
from shardwright.planning.row_dims import batches_of


@without_collection()
def lower(pipeline: Pipeline | str | Path) -> Pipeline:
    """The pipeline, or that of a file, with lowered supertasks; lowered ones stay as they are.

    Raises PipelineError where the pipeline is not right, ExecError where a graph cannot be lowered,
    InputError for what is no pipeline.
    """
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
        metadata=_metadata(pipeline),
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
            kind = "cuda" if slot.kind == "cuda" else "cpu"
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


def _metadata(pipeline: Pipeline) -> Metadata:
    """The metadata, with what operators tell of rows and kernel calls do not."""
    metadata = pipeline.metadata
    if pipeline.training is not None and pipeline.training.microbatches is not None:
        return metadata
    return msgspec.structs.replace(metadata, rows=metadata.rows or batches_of(pipeline))


def _foreign(texts: set[str]) -> set[str]:
    """The operators that the texts call and that torch does not bring."""
    return {op for text in texts for op in read_text("dfg", text).operators if not is_built_in(op)}
