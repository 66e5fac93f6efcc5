"""Files that were changed at one place: refused in words, or run as what they say.

Good files come from the training steps (forward, backward, update) of a decoder and of a network of
images. One shape, dtype, stride, operand, or byte of attributes becomes another.
``MUTANTS`` in the environment says how many are tried.
"""

import base64
import json
import os
import warnings
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import shardwright as sw
from shardwright.errors import ExecError
from shardwright.exec.executor import Executor
from shardwright.exec.files import decode
from shardwright.exec.kinds import BY_ID
from shardwright.exec.lowered import LoweredGraph
from shardwright.exec.spots import extent
from shardwright.exec.task_program import plan_task
from shardwright.ir.dtypes import DTYPES, torch_dtype
from shardwright.ir.values import contiguous_strides
from tests.exec.running import assert_close
from tests.runtime.programs import gpt, tokens


class Images(nn.Module):
    """Convolutions with norms and pools."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3, padding=1, groups=2)
        self.norm, self.last = nn.BatchNorm2d(8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.norm(self.first(x))), 2)
        x = F.adaptive_avg_pool2d(x + self.second(x), 1)
        return self.last(x.flatten(1))


def _texts(pipeline: sw.Pipeline) -> set[str]:
    lowered = sw.lower(pipeline)
    tasks = lowered.supertasks.items()
    return {lowered.data_of(name) for name, task in tasks if task.kind == "dfg"}


def _step(made: Any, batch: Any) -> set[str]:
    graph = sw.compile_ir(made.step, *batch)
    return _texts(sw.build(graph, sw.plan(graph, devices=2)))


def _images() -> set[str]:
    torch.manual_seed(0)
    model, x = Images(), torch.randn(2, 3, 8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(x: Tensor, target: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), target)
        loss.backward()
        optimizer.step()
        return loss

    graph = sw.compile_ir(step, x, torch.randn(2, 4))
    return _texts(sw.build(graph, sw.plan(graph, devices=1)))


@cache
def texts() -> list[str]:
    """Tasks of all models, in one order."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return sorted(_step(gpt(0.1), tokens(1)[0]) | _images())


def test_the_files_hold_what_is_to_be_changed() -> None:
    kinds = {BY_ID[call["kind"]].name for text in texts() for call in json.loads(text)["calls"]}
    wanted = {
        *("generic", "view", "fill", "concat", "add", "chain", "dropout", "gemm", "reduce_sum"),
        *("layer_norm", "layer_norm_bwd", "attention", "attention_bwd", "embedding"),
        *("embedding_bwd", "cross_entropy", "cross_entropy_bwd", "mse", "mse_bwd", "conv"),
        *("batch_norm", "batch_norm_bwd", "adamw", "sgd", "step_inc"),
    }
    assert wanted <= kinds


# --- what is changed -------------------------------------------------------------------------

SIZES = st.sampled_from([0, 1, 2, 3, 4, 5, 8, 16, 17, -1])


def mutate(draw: Any, text: dict[str, Any]) -> None:
    """Change one thing in place."""
    what = draw(st.sampled_from(sorted(CHANGES)))
    CHANGES[what](draw, text)


def _value(draw: Any, text: dict[str, Any]) -> dict[str, Any]:
    return text["values"][draw(st.integers(0, len(text["values"]) - 1))]


def _call(draw: Any, text: dict[str, Any]) -> dict[str, Any]:
    return text["calls"][draw(st.integers(0, len(text["calls"]) - 1))]


def _dtype(draw: Any, text: dict[str, Any]) -> None:
    _value(draw, text)["dtype"] = draw(st.sampled_from(sorted(DTYPES)))


def _shape(draw: Any, text: dict[str, Any]) -> None:
    shape = _value(draw, text)["shape"]
    place = draw(st.integers(0, len(shape)))
    how = draw(st.sampled_from(["size", "insert", "remove"]))
    if how == "insert" or place == len(shape):
        shape.insert(place, draw(SIZES))
    elif how == "remove":
        del shape[place]
    else:
        shape[place] = draw(SIZES)


def _strides(draw: Any, text: dict[str, Any]) -> None:
    value = _value(draw, text)
    value["strides"] = [draw(st.integers(0, 20)) for _ in value["shape"]]


def _blob(draw: Any, text: dict[str, Any]) -> None:
    call = _call(draw, text)
    blob = bytearray(base64.b64decode(call.get("blob", "")))
    place = draw(st.integers(0, len(blob)))
    if place == len(blob):
        blob.append(draw(st.integers(0, 255)))
    else:
        blob[place] = draw(st.integers(0, 255) | st.just(blob[place] ^ 1))
    call["blob"] = base64.b64encode(blob).decode()


def _operand(draw: Any, text: dict[str, Any]) -> None:
    call = _call(draw, text)
    side = call[draw(st.sampled_from(["inputs", "outputs"]))]
    other = draw(st.integers(-1, len(text["values"])))
    if side:
        side[draw(st.integers(0, len(side) - 1))] = other


def _kind(draw: Any, text: dict[str, Any]) -> None:
    call = _call(draw, text)
    call[draw(st.sampled_from(["kind", "schema"]))] = draw(st.integers(0, 44))


def _outputs(draw: Any, text: dict[str, Any]) -> None:
    outputs = text["outputs"]
    if outputs:
        outputs[draw(st.integers(0, len(outputs) - 1))] = draw(st.integers(0, len(text["values"])))


CHANGES = {
    "dtype": _dtype,
    "shape": _shape,
    "strides": _strides,
    "blob": _blob,
    "operand": _operand,
    "kind": _kind,
    "outputs": _outputs,
}


# --- what becomes of it ----------------------------------------------------------------------


def feed_of(graph: LoweredGraph) -> dict[str, Tensor]:
    """Numbers for every input; whole ones are zeros, which any table has a row for."""
    draws = torch.Generator().manual_seed(0)
    feed = {}
    for vid in graph.inputs:
        spec = graph.values[vid]
        strides = spec.strides or contiguous_strides(spec.shape)
        x = torch.rand(extent(spec.shape, strides), generator=draws) + 0.5
        whole = not torch_dtype(spec.dtype).is_floating_point
        x = (x * 0 if whole else x).to(torch_dtype(spec.dtype))
        feed[spec.name] = x.as_strided(spec.shape, strides)
    return feed


def is_torchs(error: Exception) -> bool:
    """Whether torch has no kernel of a dtype, or an operator takes less than it told of."""
    notes = getattr(error, "__notes__", [""])
    return isinstance(error, NotImplementedError) or notes[0].startswith("in generic, call")


@settings(deadline=None, max_examples=int(os.environ.get("MUTANTS", "100")))
@given(st.data())
def test_a_changed_file_is_refused_or_runs(data: st.DataObject) -> None:
    text = json.loads(texts()[data.draw(st.integers(0, len(texts()) - 1))])
    mutate(data.draw, text)
    try:
        graph = decode(json.dumps(text))
    except ExecError:
        return
    plan, feed = plan_task(graph), feed_of(graph)
    found = []
    for native in (True, False):
        try:
            found.append(Executor(plan, native=native).run(feed))
        except RuntimeError as error:
            if not is_torchs(error):
                raise
    for made in found:
        for vid, tensor in zip(graph.outputs, made, strict=True):
            spec = graph.values[vid]
            assert (tuple(tensor.shape), tensor.dtype) == (spec.shape, torch_dtype(spec.dtype))


@pytest.mark.parametrize("number", range(3))
def test_good_files_run_alike_on_both_roads(number: int) -> None:
    graph = decode(texts()[number * len(texts()) // 3])
    plan, feed = plan_task(graph), feed_of(graph)
    native, torchs = (Executor(plan, native=chosen).run(feed) for chosen in (True, False))
    for a, b in zip(native, torchs, strict=True):
        assert_close(a, b, 1e-4)
