"""One wrong thing at a time: version, names, devices, fields by kind, counts, and order."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.communication import COMMUNICATION
from shardwright.errors import PipelineError
from shardwright.pipeline import Device, Document, SuperTask, TensorInfo, check
from shardwright.pipeline.check_structure import check_deadlock
from shardwright.pipeline.connections import connect
from shardwright.pipeline.rules import FAMILIES, FAMILY_OF
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


TASKS = cases(
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


def order(*names: str) -> object:
    """Put these supertasks first, in this order."""

    def change(document: Document) -> None:
        tasks = document.supertasks
        rest = [name for name in tasks if name not in names]
        document.supertasks = {name: tasks[name] for name in (*names, *rest)}

    return change


def loop_on_a_device(document: Document) -> None:
    document.supertasks["d0.0"].inputs = ("h2", "w1")


def exchange() -> Document:
    """d0 and d1 each send what they get as x, and return what they receive."""
    document = collective("all_reduce", [(4, 8)] * 2, [(4, 8)] * 2, {"reduce_op": "sum"})
    tasks = document.supertasks
    del tasks["all_reduce.0"], tasks["all_reduce.1"]
    output = tasks.pop("output")
    tasks["send.0"] = SuperTask("send", ("x0",), (), "d0", None, "there", 0, {})
    tasks["recv.0"] = SuperTask("recv", (), ("y0",), "d0", None, "back", 1, {})
    tasks["recv.1"] = SuperTask("recv", (), ("y1",), "d1", None, "there", 1, {})
    tasks["send.1"] = SuperTask("send", ("x1",), (), "d1", None, "back", 0, {})
    tasks["output"] = output
    return document


def loop_through_groups(document: Document) -> None:
    """Each device sends on what it receives."""
    document.supertasks["send.0"].inputs = ("y0",)
    document.supertasks["send.1"].inputs = ("y1",)
    order("recv.0", "send.0", "recv.1", "send.1")(document)  # type: ignore[operator]


def two_reductions() -> Document:
    """Two all_reduce one after the other on two devices."""
    document = collective("all_reduce", [(4, 8)] * 2, [(4, 8)] * 2, {"reduce_op": "sum"})
    output = document.supertasks.pop("output")
    for i in range(2):
        document.tensors[f"z{i}"] = TensorInfo((4, 8), "f32")
        document.supertasks[f"again.{i}"] = SuperTask(
            "all_reduce", (f"x{i}",), (f"z{i}",), f"d{i}", None, "h", i, {"reduce_op": "sum"}
        )
    document.supertasks["output"] = output
    return document


ORDER = cases(
    Broken("a user first", "file-order", order("input", "d0.1", "d0.0"), "d0.1", "h1"),
    Broken("a send first", "file-order", order("send"), "send", "h2"),
    Broken("a user before the recv", "file-order", order("d1.0"), "d1.0", "h2@d1"),
    Broken("on one device", "no-cycle", loop_on_a_device, "d0.0"),
    Broken("through groups", "no-cycle", loop_through_groups, "recv.0", base=exchange),
    Broken(
        "both send first", "no-deadlock", order("send.1", "recv.1"), "send.0", "x0", base=exchange
    ),
    Broken(
        "both receive first",
        "no-deadlock",
        order("recv.0", "send.0"),
        "recv.0",
        "y0",
        base=exchange,
    ),
    Broken(
        "collectives in two orders",
        "no-deadlock",
        order("again.1"),
        "all_reduce.0",
        "x0",
        base=two_reductions,
    ),
)


def test_a_cycle_is_spelled_out() -> None:
    error = prove_broken(Broken("", "no-cycle", loop_through_groups, "recv.0", base=exchange))
    assert "group 'back' waits for group 'there' waits for group 'back'" in str(error) or (
        "group 'there' waits for group 'back' waits for group 'there'" in str(error)
    )


def test_a_deadlock_says_where_each_device_stands() -> None:
    case = Broken("", "no-deadlock", order("again.1"), "all_reduce.0", "x0", base=two_reductions)
    assert "'d0' at 'all_reduce.0' (group 'g'), 'd1' at 'again.1' (group 'h')" in str(
        prove_broken(case)
    )


def test_only_the_order_on_a_device_counts() -> None:
    document = two_stages()
    order("output", "recv", "d1.0", "d0.0", "d0.1", "send", "input")(document)  # type: ignore[operator]
    check(document)


def ring(pairs: list[tuple[int, int]], count: int) -> Document:
    """Sends between devices, in this order on each of their devices."""
    document = two_stages()
    document.supertasks.clear()
    for i, (source, sink) in enumerate(pairs):
        for kind, device, idx in (("send", source, 0), ("recv", sink, 1)):
            names = ((f"a{i}",), ()) if kind == "send" else ((), (f"b{i}",))
            document.supertasks[f"{kind}{i}"] = SuperTask(
                kind, *names, f"d{device}", None, f"g{i}", idx, {}
            )
    document.devices = {f"d{i}": document.devices["d0"] for i in range(count)}
    return document


def waits_for_ever(document: Document) -> bool:
    """The reference: try all moves of two devices that meet, one at a time."""
    tasks = document.supertasks
    queues = {device: list(names) for device, names in connect(document).order.items()}
    moved = True
    while moved:
        moved = False
        for device in queues:
            for other in queues:
                a, b = queues[device], queues[other]
                if device != other and a and b and tasks[a[0]].group == tasks[b[0]].group:
                    a.pop(0)
                    b.pop(0)
                    moved = True
    return any(queues.values())


@settings(deadline=None)
@given(
    st.lists(st.permutations(range(3)).map(lambda p: (p[0], p[1])), max_size=6),
    st.randoms(use_true_random=False),
)
def test_deadlock_is_what_trying_shows(
    pairs: list[tuple[int, int]], shuffled: random.Random
) -> None:
    document = ring(pairs, 3)
    names = list(document.supertasks)
    shuffled.shuffle(names)
    document.supertasks = {name: document.supertasks[name] for name in names}
    found = check_deadlock(connect(document))
    assert ("no-deadlock" in str(found)) == waits_for_ever(document)


@settings(deadline=None)
@given(st.lists(st.permutations(range(4)).map(lambda p: (p[0], p[1])), max_size=8))
def test_one_order_for_all_never_deadlocks(pairs: list[tuple[int, int]]) -> None:
    assert check_deadlock(connect(ring(pairs, 4))) is None


@pytest.mark.parametrize("case", [*TASKS, *ORDER])
def test_broken(case: Broken) -> None:
    prove_broken(case)
