"""One wrong thing at a time in groups, for every kind of communication."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.errors import PipelineError
from shardwright.pipeline import Document, SuperTask, TensorInfo, check
from tests.pipeline.documents import (
    COLLECTIVES,
    Broken,
    cases,
    collective,
    prove_broken,
    task,
    tensor,
    together,
    two_stages,
)
from tests.pipeline.training import training_step


def reduction_in_a_step() -> Document:
    """`training_step`, in whose update the slots sum up their rates, by which d0 descends."""
    document = training_step()
    update, output = (document.supertasks.pop(name) for name in ("d0.U.0", "output"))
    for i, rate in enumerate(("lr", "lr@d1")):
        document.tensors[f"sum{i}"] = TensorInfo((), "f32")
        member = SuperTask("all_reduce", (rate,), (f"sum{i}",), f"d{i}", None, "sum", i)
        member.metadata, member.phase = {"reduce_op": "sum"}, "update"
        document.supertasks[f"sum.{i}"] = member
    update.inputs = (*update.inputs[:2], "sum0")
    document.supertasks.update({"d0.U.0": update, "output": output})
    return document


def shape(name: str, *sizes: int) -> Callable[[Document], None]:
    """Give a tensor of `collective` another shape, with its slices and originals."""

    def change(document: Document) -> None:
        document.tensors[name].shape = sizes
        side = "inputs" if name[0] == "x" else "outputs"
        getattr(document.metadata.tensors, side)[name].shape = sizes
        piece = getattr(document.metadata.tensor_slices, side)[name]
        piece.placements = tuple((0, size) for size in sizes)

    return change


def dtype(name: str, found: str) -> Callable[[Document], None]:
    """Give a tensor of `collective` another dtype, with its slices and originals."""

    def change(document: Document) -> None:
        side = "inputs" if name[0] == "x" else "outputs"
        document.tensors[name].dtype = found  # type: ignore[assignment]
        getattr(document.metadata.tensors, side)[name].dtype = found
        getattr(document.metadata.tensor_slices, side)[name].dtype = found

    return change


def without_member(name: str) -> Callable[[Document], None]:
    """Take a member away, with its device and tensors."""

    def change(document: Document) -> None:
        gone = document.supertasks.pop(name)
        del document.devices[gone.device or ""]
        for tensors, side, end in (
            (gone.inputs, "inputs", "input"),
            (gone.outputs, "outputs", "output"),
        ):
            for lost in tensors:
                del document.tensors[lost]
                del getattr(document.metadata.tensors, side)[lost]
                del getattr(document.metadata.tensor_slices, side)[lost]
                last = document.supertasks[end]
                last.inputs = tuple(name for name in last.inputs if name != lost)
                last.outputs = tuple(name for name in last.outputs if name != lost)
        for originals in (document.metadata.tensors.inputs, document.metadata.tensors.outputs):
            for idx, whole in enumerate(originals.values()):
                whole.idx = idx

    return change


def row(what: str, rule: str, base: str, change: Any, member: int, tensor: str) -> Broken:
    """A row for a document of `COLLECTIVES`."""
    kind = base.split()[0]
    return Broken(what, rule, change, f"{kind}.{member}", tensor, COLLECTIVES[base])


def all_metadata(kind: str, count: int, **metadata: Any) -> Callable[[Document], None]:
    return together(*(task(f"{kind}.{i}", metadata=metadata) for i in range(count)))


CASES = cases(
    Broken(
        "two sends and a recv",
        "group-kind",
        lambda d: d.supertasks.update(
            more=SuperTask("send", ("h2@d1",), (), "d1", None, "g0", 2, {})
        ),
        "send",
        "h2",
    ),
    row(
        "two kinds",
        "group-kind",
        "all_reduce",
        task("all_reduce.1", kind="all_gather", metadata={"dim": 0}),
        1,
        "x1",
    ),
    Broken("apart", "group-kind", task("recv", group="g1"), "send", "h2"),
    row("one twice", "group-members", "all_reduce", task("all_reduce.2", device_idx=1), 2, "x2"),
    row("not from 0", "group-members", "all_reduce", task("all_reduce.0", device_idx=3), 1, "x1"),
    row("one missing", "group-members", "all_gather", without_member("all_gather.1"), 2, "x2"),
    row(
        "two on a device",
        "group-members",
        "all_reduce",
        together(
            without_member("all_reduce.2"),
            task("all_reduce.1", device="d0"),
            lambda d: d.devices.pop("d1"),
            lambda d: setattr(d.metadata.tensor_slices.inputs["x1"], "device", "d0"),
            lambda d: setattr(d.metadata.tensor_slices.outputs["y1"], "device", "d0"),
        ),
        1,
        "x1",
    ),
    Broken(
        "recv before send",
        "group-members",
        together(task("send", device_idx=1), task("recv", device_idx=0)),
        "recv",
        "h2@d1",
    ),
    row(
        "a source outside",
        "group-members",
        "broadcast",
        together(
            lambda d: d.supertasks.update(
                other=SuperTask("FX", ("x2",), ("z",), "d2", "unread"),
            ),
            lambda d: d.supertasks.pop("broadcast.2"),
            all_metadata("broadcast", 2, src="d2"),
            lambda d: d.tensors.update(z=d.tensors.pop("y2")),
            lambda d: d.metadata.tensors.outputs.pop("y2"),
            lambda d: d.metadata.tensor_slices.outputs.pop("y2"),
            task("output", inputs=("y0", "y1")),
        ),
        0,
        "y0",
    ),
    row(
        "another metadata",
        "group-metadata",
        "all_reduce",
        task("all_reduce.1", metadata={"reduce_op": "max"}),
        1,
        "x1",
    ),
    Broken(
        "back to the forward",
        "group-metadata",
        task("g1.recv", phase="forward"),
        *("g1.recv", "dh"),
        base=training_step,
    ),
    Broken(
        "a reduction in two phases",
        "group-metadata",
        task("sum.1", phase="prepare"),
        *("sum.1", "lr@d1"),
        base=reduction_in_a_step,
    ),
    Broken("another dtype", "group-dtype", tensor("h2@d1", dtype="f16"), "recv", "h2@d1"),
    row("another dtype", "group-dtype", "all_to_all", dtype("y1", "i32"), 1, "y1"),
    row("send", "group-shape", "all_reduce", shape("y2", 4, 5), 2, "y2"),
    Broken("send", "group-shape", tensor("h2@d1", shape=(8, 4)), "recv", "h2@d1"),
    Broken(
        "send of other dimensions", "group-shape", tensor("h2@d1", shape=(32,)), "recv", "h2@d1"
    ),
    row("another input", "group-shape", "all_reduce", shape("x1", 4, 5), 1, "x1"),
    row("reduce into another", "group-shape", "reduce", shape("y1", 6, 4), 1, "y1"),
    row("reduce of another", "group-shape", "reduce", shape("x2", 6, 4), 2, "x2"),
    row("broadcast to another", "group-shape", "broadcast", shape("y0", 4, 7), 0, "y0"),
    row("gather of another", "group-shape", "all_gather", shape("x1", 2, 7), 1, "x1"),
    row("gather of too much", "group-shape", "all_gather", shape("x0", 3, 6), 0, "y0"),
    row("gather into too little", "group-shape", "all_gather", shape("y1", 5, 6), 1, "y1"),
    row(
        "a smaller piece first",
        "group-shape",
        "all_gather uneven",
        together(shape("x0", 2, 6), shape("x2", 3, 6)),
        1,
        "x1",
    ),
    row("scatter of another", "group-shape", "reduce_scatter", shape("x2", 4, 7), 2, "x2"),
    row("scatter of too little", "group-shape", "reduce_scatter", shape("y2", 4, 1), 0, "x0"),
    row("scatter into another", "group-shape", "reduce_scatter", shape("y2", 5, 2), 2, "y2"),
    row(
        "a smaller piece first",
        "group-shape",
        "reduce_scatter uneven",
        together(shape("y0", 4, 2), shape("y1", 4, 3)),
        1,
        "y1",
    ),
    row("exchange of another", "group-shape", "all_to_all", shape("x1", 5, 3), 1, "x1"),
    row("exchange into another", "group-shape", "all_to_all", shape("y1", 2, 7), 1, "y1"),
    row(
        "a smaller piece of the input first",
        "group-shape",
        "all_to_all uneven",
        together(shape("x0", 5, 2), shape("x1", 5, 3)),
        1,
        "x1",
    ),
    row(
        "a smaller piece of the output first",
        "group-shape",
        "all_to_all uneven",
        together(shape("y0", 2, 5), shape("y1", 3, 5)),
        1,
        "y1",
    ),
    row(
        "exchange in one dimension into another",
        "group-shape",
        "all_to_all in one dimension",
        together(*(shape(name, 5, 3) for name in ("x0", "x1", "y0", "y1"))),
        0,
        "y0",
    ),
    row("dim", "group-shape", "all_gather", all_metadata("all_gather", 3, dim=2), 0, "x0"),
    row(
        "src_dim",
        "group-shape",
        "all_to_all",
        all_metadata("all_to_all", 2, src_dim=5, dst_dim=0),
        0,
        "x0",
    ),
)


@pytest.mark.parametrize("case", CASES)
def test_broken(case: Broken) -> None:
    prove_broken(case)


@pytest.mark.parametrize("kind", ["all_reduce", "all_gather", "reduce_scatter", "all_to_all"])
def test_a_group_of_one(kind: str) -> None:
    metadata: dict[str, dict[str, int | str]] = {
        "all_reduce": {"reduce_op": "sum"},
        "all_gather": {"dim": 0},
        "reduce_scatter": {"reduce_op": "sum", "dim": 0},
        "all_to_all": {"src_dim": 0, "dst_dim": 1},
    }
    with pytest.raises(PipelineError) as caught:
        check(collective(kind, [(4, 4)], [(4, 4)], metadata[kind]))
    assert caught.value.rule == "group-members"


@pytest.mark.parametrize("found", ["i64", "i32", "i16", "i8", "bool"])
@pytest.mark.parametrize("kind", ["reduce", "all_reduce", "reduce_scatter"])
def test_avg_of_integers_is_refused(kind: str, found: str) -> None:
    base = COLLECTIVES[kind]()
    metadata = dict(base.supertasks[f"{kind}.0"].metadata or {}, reduce_op="avg")
    shapes = [
        [base.tensors[n].shape if (n := f"{side}{i}") in base.tensors else None for i in range(3)]
        for side in "xy"
    ]
    with pytest.raises(PipelineError, match=f"avg of {found} is not defined") as caught:
        check(collective(kind, shapes[0], shapes[1], metadata, found))
    assert caught.value.rule == "group-dtype"
    for operation in ("sum", "max", "min"):
        check(collective(kind, shapes[0], shapes[1], metadata | {"reduce_op": operation}, found))


def test_the_order_of_members_in_the_file_is_free() -> None:
    document = COLLECTIVES["all_gather uneven"]()
    document.supertasks = dict(reversed(document.supertasks.items()))
    check(document)


def test_a_message_shows_shapes() -> None:
    with pytest.raises(PipelineError) as caught:
        check(collective("all_gather", [(2, 6), (2, 7)], [(4, 6)] * 2, {"dim": 0}))
    assert "group 'g': all_gather has the shape [2, 7] here, expected [any, 6]" in str(caught.value)


def split(size: int, count: int) -> list[int]:
    return [size // count + (i < size % count) for i in range(count)]


@given(
    st.integers(2, 5),
    st.integers(0, 9),
    st.integers(0, 9),
    st.sampled_from(["all_gather", "reduce_scatter", "all_to_all"]),
    st.booleans(),
)
def test_every_balanced_split_passes(
    count: int, rows: int, columns: int, kind: str, transposed: bool
) -> None:
    def oriented(shapes: list[tuple[int, int]]) -> list[tuple[int, ...] | None]:
        return [tuple(reversed(s)) if transposed else s for s in shapes]

    whole = [(rows, columns)] * count
    by_rows = [(size, columns) for size in split(rows, count)]
    by_columns = [(rows, size) for size in split(columns, count)]
    first, second = (1, 0) if transposed else (0, 1)
    if kind == "all_gather":
        document = collective(kind, oriented(by_rows), oriented(whole), {"dim": first})
    elif kind == "reduce_scatter":
        metadata: dict[str, int | str] = {"reduce_op": "sum", "dim": first}
        document = collective(kind, oriented(whole), oriented(by_rows), metadata)
    else:
        metadata = {"src_dim": first, "dst_dim": second}
        document = collective(kind, oriented(by_columns), oriented(by_rows), metadata)
    check(document)


def test_two_stages_pass() -> None:
    check(two_stages())
