"""The plain format: a document with the specification's own keys, and no others.

In comes a document that is right; out goes one without optional keys, or a PipelineError that names
the extensions without which it would not mean the same. Shared graphs are written out, and what
only says more than is needed (`ParamValue.shape`, ``metadata.structure``, ``metadata.rows``) goes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

from msgspec.structs import replace

from shardwright.errors import PipelineError
from shardwright.pipeline.check import check
from shardwright.pipeline.check_compute import data_of
from shardwright.pipeline.rules import broken
from shardwright.pipeline.schema import Document, SuperTask, TensorInfo

D = TypeVar("D", bound=Document)

DTYPES = frozenset({"f64", "f32", "f16", "bf16", "f8", "bool", "i64", "i32", "i16", "i8"})
"""The specification's dtypes; all others of `schema.DType` extend it."""

DEVICE_KINDS = frozenset({"cpu", "npu"})
"""The specification's kinds of devices."""


def plain(document: D) -> D:
    """The document in the plain format, checked. Raises PipelineError where it cannot say it all.

    Inputs and outputs of a plain file are tensors: how they fold into lists, dicts and objects is
    an optional key, so it is called with tensors, by position or name, and gives one, or a dict.
    """
    if needed := list(dict.fromkeys(_extensions(document))):
        raise _not_plain("; ".join(needed))
    found = replace(
        document,
        devices={name: replace(device, host=None) for name, device in document.devices.items()},
        tensors={name: _tensor(info) for name, info in document.tensors.items()},
        supertasks={name: _task(document, task) for name, task in document.supertasks.items()},
        metadata=replace(document.metadata, structure=None, rows=()),
        version=None,
        blobs=None,
    )
    try:
        check(found)
    except PipelineError as error:
        raise _not_plain(_strides(document, error)) from error
    return found


def _extensions(document: Document) -> Iterator[str]:
    """What the document says that the specification has no key or word for."""
    if document.training is not None:
        what = "a training step" if document.training.microbatches else "buffers that are written"
        yield f"training ({what})"
    if document.requires:
        yield f"requires (the operator {document.requires[0]!r})"
    hosts = {device.host for device in document.devices.values()}
    if len(hosts) > 1:
        yield f"host (devices of {len(hosts)} hosts)"
    for name, device in document.devices.items():
        if device.kind not in DEVICE_KINDS:
            yield f"the device kind {device.kind!r} (of {name!r})"
            break
    fused = (name for name, device in document.devices.items() if device.pes is not None)
    for name in fused:
        yield f"pes (of device {name!r})"
        break
    yield from _extensions_of_tensors(document)


def _extensions_of_tensors(document: Document) -> Iterator[str]:
    metadata = document.metadata
    for maps in (
        document.tensors,
        metadata.tensors.inputs,
        metadata.tensors.outputs,
        metadata.tensor_slices.inputs,
        metadata.tensor_slices.outputs,
    ):
        for name, info in maps.items():
            if info.dtype not in DTYPES:
                yield f"the dtype {info.dtype!r} (of {name!r})"
                return
    for name, info in document.tensors.items():
        if info.init is not None:
            yield f"init (of {name!r})"
            return


def _tensor(info: TensorInfo) -> TensorInfo:
    value = info.value and replace(info.value, shape=None)
    return replace(info, value=value, strides=None)


def _task(document: Document, task: SuperTask) -> SuperTask:
    if task.data_blob is None:
        return task
    return replace(task, data=data_of(document, task), data_blob=None)


def _strides(document: Document, error: PipelineError) -> str:
    """Which strides the graph needs that could not be proved without them."""
    task = document.supertasks.get(error.task or "")
    names = (error.tensor, *task.inputs, *task.outputs) if task else (error.tensor,)
    lying = [name for name in names if name and document.tensors[name].strides is not None]
    place = f"of {lying[0]!r}" if lying else f"of what {error.task!r} reads"
    return f"strides ({place}, which is not contiguous: {error})"


def _not_plain(extensions: str) -> PipelineError:
    return broken(
        "plain",
        f"the pipeline needs extensions of the format to mean the same: {extensions}; save it "
        "without plain",
    )
