"""One wrong thing at a time: version, names, devices, fields by kind, metadata, counts."""

from __future__ import annotations

import pytest

from shardwright.errors import PipelineError
from shardwright.pipeline import Device, Document, SuperTask, check
from shardwright.pipeline.rules import COMMUNICATION, FAMILIES, FAMILY_OF
from shardwright.pipeline.schema import SuperTaskKind
from tests.pipeline.documents import (
    COLLECTIVES,
    Broken,
    cases,
    collective,
    prove_broken,
    task,
    together,
    two_stages,
)


def rename(section: str, old: str, new: str = "") -> object:
    def change(document: Document) -> None:
        entries = getattr(document, section)
        entries[new] = entries.pop(old)

    return change


CASES = cases(
    Broken("a later one", "version", lambda d: setattr(d, "version", 2)),
    Broken("zero", "version", lambda d: setattr(d, "version", 0)),
    Broken("an empty device", "names", rename("devices", "d0")),
    Broken("an empty tensor", "names", rename("tensors", "h1")),
    Broken("an empty supertask", "names", rename("supertasks", "d0.0")),
    Broken("an empty blob", "names", rename("blobs", "layer")),
    Broken("an empty group", "names", together(task("send", group=""), task("recv", group=""))),
    Broken("one device twice", "device-unique", lambda d: setattr(d.devices["d1"], "idx", 0)),
    Broken(
        "one device twice on a host",
        "device-unique",
        lambda d: d.devices.update(d0=Device("npu", 3, "a"), d1=Device("npu", 3, "a")),
    ),
    Broken("no pes", "device-unique", lambda d: setattr(d.devices["d1"], "pes", ())),
    Broken("a pe twice", "device-unique", lambda d: setattr(d.devices["d1"], "pes", (1, 1))),
    Broken("an idle device", "device-used", lambda d: d.devices.update(d2=Device("cpu", 2))),
    Broken("unknown", "device-known", task("d1.0", device="d7"), "d1.0"),
    Broken(
        "unknown source",
        "device-known",
        task("broadcast.1", metadata={"src": "d7"}),
        "broadcast.1",
        base=COLLECTIVES["broadcast"],
    ),
    Broken("compute without device", "fields", task("d0.0", device=None), "d0.0"),
    Broken("compute without data", "fields", task("d1.0", data=None), "d1.0"),
    Broken("data and a blob", "fields", task("d1.0", data_blob="layer"), "d1.0"),
    Broken("compute with a group", "fields", task("d0.0", group="g1"), "d0.0"),
    Broken("compute with device_idx", "fields", task("d0.0", device_idx=0), "d0.0"),
    Broken("compute with metadata", "fields", task("d0.0", metadata={}), "d0.0"),
    Broken("dfg without data", "fields", task("d1.0", kind="dfg", data=None), "d1.0"),
    Broken("send without device", "fields", task("send", device=None), "send"),
    Broken("send without group", "fields", task("send", group=None), "send"),
    Broken("send without device_idx", "fields", task("send", device_idx=None), "send"),
    Broken("send without metadata", "fields", task("send", metadata=None), "send"),
    Broken("send with data", "fields", task("send", data="{}"), "send"),
    Broken("send with a blob", "fields", task("send", data_blob="layer"), "send"),
    Broken("input with a device", "fields", task("input", device="d0"), "input"),
    Broken("input with a phase", "fields", task("input", phase="forward"), "input"),
    Broken("output with data", "fields", task("output", data="{}"), "output"),
    Broken("output with metadata", "fields", task("output", metadata={}), "output"),
    Broken("a key too many", "task-metadata", task("recv", metadata={"dim": 0}), "recv"),
    Broken(
        "a key missing",
        "task-metadata",
        task("reduce_scatter.1", metadata={"dim": 1}),
        "reduce_scatter.1",
        base=COLLECTIVES["reduce_scatter"],
    ),
    Broken(
        "an unknown reduce_op",
        "task-metadata",
        task("all_reduce.2", metadata={"reduce_op": "mean"}),
        "all_reduce.2",
        base=COLLECTIVES["all_reduce"],
    ),
    Broken(
        "a dim that is a string",
        "task-metadata",
        task("all_gather.0", metadata={"dim": "0"}),
        "all_gather.0",
        base=COLLECTIVES["all_gather"],
    ),
    Broken(
        "a device that is a number",
        "task-metadata",
        task("reduce.0", metadata={"reduce_op": "sum", "dst": 1}),
        "reduce.0",
        base=COLLECTIVES["reduce"],
    ),
    Broken("send with an output", "task-tensors", task("send", outputs=("h2@d1",)), "send"),
    Broken("send without input", "task-tensors", task("send", inputs=()), "send"),
    Broken("recv with an input", "task-tensors", task("recv", inputs=("h2",)), "recv"),
    Broken("input with an input", "task-tensors", task("input", inputs=("y",)), "input"),
    Broken("output with an output", "task-tensors", task("output", outputs=("x",)), "output"),
    Broken(
        "reduce with an output beside dst",
        "task-tensors",
        task("reduce.0", outputs=("y1",)),
        "reduce.0",
        base=COLLECTIVES["reduce"],
    ),
    Broken(
        "broadcast with an input beside src",
        "task-tensors",
        task("broadcast.0", inputs=("x2",)),
        "broadcast.0",
        base=COLLECTIVES["broadcast"],
    ),
    Broken(
        "two inputs",
        "task-tensors",
        task("all_reduce.0", inputs=("x0", "x1")),
        "all_reduce.0",
        base=COLLECTIVES["all_reduce"],
    ),
    Broken("none", "one-input-task", lambda d: d.supertasks.pop("input")),
    Broken(
        "two",
        "one-input-task",
        lambda d: d.supertasks.update(again=SuperTask("input", (), ())),
        "again",
    ),
    Broken("none", "one-output-task", lambda d: d.supertasks.pop("output")),
    Broken(
        "two",
        "one-output-task",
        lambda d: d.supertasks.update(again=SuperTask("output", (), ())),
        "again",
    ),
)


@pytest.mark.parametrize("case", CASES)
def test_broken(case: Broken) -> None:
    prove_broken(case)


def test_the_tables_cover_every_kind() -> None:
    assert set(FAMILY_OF) == set(SuperTaskKind.__args__)  # type: ignore[attr-defined]
    assert set(COMMUNICATION) == set(FAMILIES["communication"].kinds)


def test_a_message_says_what_to_do() -> None:
    error = prove_broken(
        Broken("", "fields", task("d1.0", data_blob="layer"), "d1.0"),
    )
    assert str(error) == (
        "supertask 'd1.0': a compute supertask (FX) needs exactly one of data and data_blob, "
        "found data and data_blob [rule fields]"
    )


def test_the_same_number_on_other_hosts_or_kinds_is_another_device() -> None:
    document = two_stages()
    document.devices = {"d0": Device("npu", 0, pes=(0, 1)), "d1": Device("cpu", 0)}
    check(document)
    document.devices = {"d0": Device("cuda", 0, "a"), "d1": Device("cuda", 0, "b")}
    check(document)


def test_dfg_data_is_read() -> None:
    document = two_stages()
    document.supertasks["d1.0"].kind = "dfg"
    document.supertasks["d1.0"].data = "anything"
    with pytest.raises(PipelineError, match=r"'d1\.0'.*\[rule graph\]"):
        check(document)


@pytest.mark.parametrize("kind", ["send", "recv"])
def test_send_and_recv_without_a_partner(kind: str) -> None:
    inputs, outputs = ([(2,)], [None]) if kind == "send" else ([None], [(2,)])
    with pytest.raises(PipelineError, match="group-kind"):
        check(collective(kind, inputs, outputs, {}))
