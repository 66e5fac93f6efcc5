"""File order, cycles and deadlocks."""

from __future__ import annotations

import random
from contextlib import nullcontext

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.errors import PipelineError
from shardwright.pipeline import Document, SuperTask, TensorInfo, check
from shardwright.pipeline.check_structure import check_deadlock
from shardwright.pipeline.connections import connect
from tests.pipeline.documents import Broken, cases, collective, prove_broken, two_stages


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


CASES = cases(
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


@pytest.mark.parametrize("case", CASES)
def test_broken(case: Broken) -> None:
    prove_broken(case)


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
    stands = waits_for_ever(document)
    with pytest.raises(PipelineError, match="no-deadlock") if stands else nullcontext():
        check_deadlock(connect(document))


@given(st.lists(st.permutations(range(4)).map(lambda p: (p[0], p[1])), max_size=8))
def test_one_order_for_all_never_deadlocks(pairs: list[tuple[int, int]]) -> None:
    document = ring(pairs, 4)
    check_deadlock(connect(document))
