"""Training steps of files: phases, microbatches, and the schedule that they are run by."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given

from shardwright.errors import PipelineError, ScheduleError
from shardwright.pipeline import (
    Document,
    MetadataTensorSlice,
    Microbatches,
    ScheduleInfo,
    SuperTask,
    TensorInfo,
    Training,
    check,
)
from shardwright.pipeline.check_schedule import check_schedule, schedule_info, schedule_of
from shardwright.pipeline.connections import connect
from shardwright.schedules import KINDS, Schedule, make_schedule
from tests.pipeline.documents import Broken, cases, constant, prove_broken, put, task
from tests.pipeline.training import message, training_step
from tests.schedules.drawing import schedules


def check_order_of(document: Document) -> None:
    if isinstance(found := check_schedule(connect(document)), PipelineError):
        raise found


def schedule(**fields: object) -> Callable[[Document], None]:
    """A change of the schedule's numbers."""

    def change(document: Document) -> None:
        training = document.training
        assert training is not None
        assert training.schedule is not None
        training.schedule = msgspec.structs.replace(training.schedule, **fields)

    return change


def refused(document: Document) -> PipelineError:
    with pytest.raises(PipelineError) as caught:
        check(document)
    return caught.value


def test_a_training_step_passes() -> None:
    check(training_step())


def test_a_document_without_a_schedule_passes() -> None:
    document = training_step()
    document.training = None
    check_order_of(document)


def test_the_files_rules_come_first() -> None:
    document = training_step()
    document.supertasks["d0.F0.0"].stage = None
    assert refused(document).rule == "stages"


def test_an_unknown_kind() -> None:
    document = training_step()
    schedule(kind="1f1c")(document)
    error = refused(document)
    assert error.rule == "schedule"
    assert "training.schedule.kind" in str(error)


def test_a_placement_of_another_kind() -> None:
    document = training_step()
    schedule(placement=(1, 0), slots=(("d1",), ("d0",)))(document)
    error = refused(document)
    assert error.rule == "schedule"
    assert "training.schedule.placement" in str(error)


def test_a_stage_that_reads_what_a_later_one_makes() -> None:
    """Two stages on one slot, the first of which reads what the second makes."""
    document = chain(1, 2, "interleaved")
    first, second = document.supertasks["d0.F0"], document.supertasks["d0.F1"]
    first.inputs, second.inputs = (second.outputs[0],), ("x",)
    with pytest.raises(PipelineError) as caught:
        check_order_of(document)
    error = caught.value
    assert (error.rule, error.task, error.tensor) == ("schedule-order", "d0.F0", "h1")
    assert "'d0.F1' makes the tensor in F0 of stage 1" in str(error)


def chain(ranks: int, chunks: int, kind: str, microbatches: int = 4, tasks: int = 1) -> Document:
    """One slot a rank; each stage reads what the one before makes, and back.

    Only the schedule's check is for it: the graphs are missing.
    """
    made = make_schedule(kind, ranks=ranks, chunks=chunks, microbatches=microbatches)
    document = training_step()
    document.devices = {f"d{i}": document.devices["d0"] for i in range(ranks)}
    document.tensors = {}
    supertasks = {}

    def compute(device: str, phase: str, stage: int, read: str, make: str) -> str:
        for i in range(tasks):
            name = f"{device}.{phase[0].upper()}{stage}" + (f".{i}" if i else "")
            output = make if i == tasks - 1 else f"{make}.{i}"
            document.tensors[output] = TensorInfo((), "f32")
            task = SuperTask("FX", (read,), (output,), device, "{}", phase=phase, stage=stage)  # type: ignore[arg-type]
            supertasks[name] = task
            read = output
        return read

    def move(read: str, phase: str, source: int, target: int) -> str:
        devices = [f"d{made.placement[stage]}" for stage in (source, target)]
        if devices[0] == devices[1]:
            return read
        got = f"{read}@{devices[1]}"
        document.tensors[got] = TensorInfo((), "f32")
        places = (f"{phase} {source}", f"{phase} {target}")
        both = message(
            f"{phase[0]}{source}", (devices[0], places[0], read), (devices[1], places[1], got)
        )
        supertasks.update(both)
        return got

    read = "x"
    for stage in range(made.stages):
        read = compute(f"d{made.placement[stage]}", "forward", stage, read, f"h{stage}")
        if stage + 1 < made.stages:
            read = move(read, "forward", stage, stage + 1)
    for stage in reversed(range(made.stages)):
        read = compute(f"d{made.placement[stage]}", "backward", stage, read, f"g{stage}")
        if stage:
            read = move(read, "backward", stage, stage - 1)
    document.supertasks = supertasks
    assert document.training is not None
    document.training.replaces = {}
    document.training.microbatches = Microbatches(microbatches)
    document.training.schedule = schedule_info(made, [[device] for device in document.devices])
    return document


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("microbatches", [1, 3, 8])
def test_stages_in_a_row_never_deadlock(kind: str, microbatches: int) -> None:
    chunks = make_schedule(kind, ranks=3, microbatches=1).chunks
    check_order_of(chain(3, chunks, kind, microbatches))


def test_a_message_against_the_stages_deadlocks() -> None:
    """Stage 0 waits in its forward for what stage 1 makes in its own, which waits for stage 0."""
    document = chain(2, 1, "1f1b")
    document.tensors |= {"late": TensorInfo((), "f32"), "late@d0": TensorInfo((), "f32")}
    late = message("late", ("d1", "forward 1", "late"), ("d0", "forward 0", "late@d0"))
    document.supertasks = late | document.supertasks
    document.supertasks["late.send"] = document.supertasks.pop("late.send")
    with pytest.raises(PipelineError) as caught:
        check_order_of(document)
    error = caught.value
    assert error.rule == "schedule-deadlock"
    assert "'d0' stands at 'late.recv' of microbatch 0, waiting for 'late.send'" in str(error)
    assert "'d1' stands at 'f0.recv' of microbatch 0, waiting for 'f0.send'" in str(error)


def reductions(orders: list[list[str]]) -> Document:
    """Slots of one rank that reduce in these orders, once a microbatch."""
    document = chain(1, 1, "gpipe", 2)
    document.devices = {f"d{i}": document.devices["d0"] for i in range(len(orders))}
    document.supertasks = {
        f"{group}.{i}": SuperTask(
            *("all_reduce", ("x",), ("y",), f"d{i}", None, group, i, {"reduce_op": "sum"}),
            phase="forward",
            stage=0,
        )
        for i, order in enumerate(orders)
        for group in order
    }
    info = ScheduleInfo("gpipe", 1, 1, (0,), (tuple(document.devices),))
    schedule(slots=info.slots)(document)
    return document


def test_reductions_in_one_order_meet() -> None:
    check_order_of(reductions([["a", "b"]] * 3))


def test_reductions_in_two_orders_do_not() -> None:
    with pytest.raises(PipelineError) as caught:
        check_order_of(reductions([["a", "b"], ["a", "b"], ["b", "a"]]))
    assert caught.value.rule == "schedule-deadlock"
    assert "'d0' stands at 'a.0' of microbatch 0, waiting for 'a.2'" in str(caught.value)
    assert "'d2' stands at 'b.2' of microbatch 0, waiting for 'b.0'" in str(caught.value)


@pytest.mark.timeout(60)
def test_a_deep_step_is_proved() -> None:
    """64 layers on 8 slots that reduce twice a layer, 32 microbatches, both ways."""
    document = reductions([[f"g{i}" for i in range(256)]] * 8)
    assert document.training is not None
    document.training.microbatches = Microbatches(32)
    check_order_of(document)


@given(schedules())
def test_a_file_tells_the_same_schedule(schedule: Schedule) -> None:
    info = schedule_info(schedule, [[f"d{rank}"] for rank in range(schedule.ranks)])
    training = Training(microbatches=Microbatches(schedule.microbatches), schedule=info)
    read = msgspec.json.decode(msgspec.json.encode(training), type=Training)
    assert schedule_of(read) == schedule


def test_what_a_file_says() -> None:
    schedule = make_schedule("zb-v", ranks=2, microbatches=4)
    assert msgspec.to_builtins(schedule_info(schedule, [["d0", "d1"], ["d2", "d3"]])) == {
        "kind": "zb-v",
        "ranks": 2,
        "chunks": 2,
        "placement": (0, 1, 1, 0),
        "slots": (("d0", "d1"), ("d2", "d3")),
    }


def training(**changes: object) -> Training:
    info = schedule_info(make_schedule("1f1b", ranks=2, microbatches=4), [["d0"], ["d1"]])
    changed: ScheduleInfo = msgspec.structs.replace(info, **changes)
    return Training(microbatches=Microbatches(4), schedule=changed)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (training(kind="pipedream"), r"training.schedule.kind is 'pipedream'; expected gpipe or"),
        (training(chunks=2), r"training.schedule.chunks: 1f1b has 1 stages a rank, not 2"),
        (training(placement=(1, 0)), r"training.schedule.placement is \[1, 0\]; expected \[0, 1\]"),
        (training(slots=(("d0",),)), r"training.schedule.slots is '1 lists'; expected 2, one a"),
        (Training(), r"training.schedule is missing: the file is not of a training step"),
        (Training(schedule=training().schedule), r"training.microbatches is missing"),
    ],
)
def test_a_wrong_key_is_named(wrong: Training, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        schedule_of(wrong)


# --- phases, stages, microbatches ---------------------------------------------------------------


def training_fields(**fields: Any) -> Callable[[Document], None]:
    """A change of ``training``."""
    return lambda document: put(**fields)(document.training)


def numbers(
    ranks: int = 2,
    chunks: int = 1,
    placement: tuple[int, ...] = (0, 1),
    slots: tuple[tuple[str, ...], ...] = (("d0",), ("d1",)),
) -> Callable[[Document], None]:
    return training_fields(schedule=ScheduleInfo("1f1b", ranks, chunks, placement, slots))


def reads(name: str, tensor: str, instead: str) -> Callable[[Document], None]:
    """A supertask reads another tensor, of the same shape."""

    def change(document: Document) -> None:
        found = document.supertasks[name]
        found.inputs = tuple(tensor if read == instead else read for read in found.inputs)

    return change


def forget(tensor: str) -> Callable[[Document], object]:
    return lambda document: document.training.replaces.pop(tensor)  # type: ignore[union-attr]


def begin_with_contents(document: Document) -> None:
    """The first gradient is stored instead of zeros."""
    document.tensors["g1"].init = None
    document.tensors["g1"].value = constant("g1", 8, 8).value


def row(
    what: str,
    rule: str,
    change: Callable[[Document], object],
    task: str | None = None,
    tensor: str | None = None,
) -> Broken:
    return Broken(what, rule, change, task, tensor, base=training_step)


PHASES = cases(
    row("no schedule", "phases", training_fields(schedule=None)),
    row("no microbatches", "phases", training_fields(microbatches=None)),
    row("a task without", "phases", task("d0.F0.0", phase=None, stage=None), "d0.F0.0"),
    row("a message without", "phases", task("g0.send", phase=None, stage=None), "g0.send"),
    Broken("outside a step", "phases", task("d0.0", phase="forward", stage=0), "d0.0"),
    row("none in the forward", "stages", task("d0.F0.0", stage=None), "d0.F0.0"),
    row("one in the update", "stages", task("d0.U.0", stage=0), "d0.U.0"),
    row("one in the preparation", "stages", task("d1.P.0", stage=1), "d1.P.0"),
    Broken("one outside a step", "stages", task("d0.0", stage=0), "d0.0"),
    row("another rank's", "stages", task("d0.F0.0", stage=1), "d0.F0.0"),
    row("beyond the last", "stages", task("d1.F1.0", stage=2), "d1.F1.0"),
    row("slots of one rank", "schedule", numbers(slots=(("d0", "d1"),))),
    row("a stage too many", "schedule", numbers(placement=(0, 1, 0))),
    row("two stages on one rank", "schedule", numbers(placement=(0, 0))),
    row("a device on two ranks", "schedule", numbers(slots=(("d0", "d1"), ("d1",)))),
    row("a device on no rank", "schedule", numbers(slots=(("d0",), ()))),
    row("an unknown device", "schedule", numbers(slots=(("d0",), ("d1", "d2")))),
    row(
        "backward before forward",
        "phase-order",
        task("d1.F1.0", phase="backward_weight"),
        "d1.B1.0",
        "y",
    ),
    row(
        "weights before gradients",
        "phase-order",
        task("d1.B1.0", phase="backward_weight"),
        "g1.send",
        "dh@d1",
    ),
    row(
        "preparation after the forward",
        "phase-order",
        reads("d1.P.0", "y", "labels"),
        "d1.P.0",
        "y",
    ),
    row("no sum", "once-a-step", forget("g1'"), "d0.U.0", "g1'"),
    row("a sum that begins anywhere", "once-a-step", begin_with_contents, "d0.U.0", "g1'"),
)


def test_one_microbatch_needs_no_sums() -> None:
    document = training_step()
    training_fields(microbatches=Microbatches(1, {"x": 0, "prediction": 0}))(document)
    document.metadata.tensors.inputs["x"].shape = (2, 8)
    document.metadata.tensors.outputs["prediction"].shape = (2, 2)
    forget("g1'")(document)
    check(document)


def dim(**dims: int) -> Callable[[Document], object]:
    """A change of the dimensions that are cut."""
    return lambda document: document.training.microbatches.dim.update(dims)  # type: ignore[union-attr]


def uncut(name: str) -> Callable[[Document], object]:
    return lambda document: document.training.microbatches.dim.pop(name)  # type: ignore[union-attr]


def microbatches(n: int) -> Callable[[Document], None]:
    return lambda document: put(n=n)(document.training.microbatches)  # type: ignore[union-attr]


def second_microbatch(side: str, name: str) -> Callable[[Document], None]:
    """A slice of the rows 2 and 3."""

    def change(document: Document) -> None:
        found: MetadataTensorSlice = getattr(document.metadata.tensor_slices, side)[name]
        found.placements = ((2, 4), *found.placements[1:])

    return change


def lr_in_the_forward(document: Document) -> None:
    found = document.supertasks["d1.F1.0"]
    found.inputs = (*found.inputs[:3], "lr@d1")


def gradient_instead(document: Document) -> None:
    """The weights of stage 1 read what the update replaces once a microbatch."""
    found = document.supertasks["d1.U.0"]
    found.inputs = ("g2", *found.inputs[1:])


def prepared(document: Document) -> None:
    """The count replaces the loss, and is what comes out as such."""
    document.supertasks["d1.U.1"].inputs = ("count",)
    replaces = document.training.replaces  # type: ignore[union-attr]
    del replaces["loss'"]
    replaces["count"] = "loss"


MICROBATCHES = cases(
    row("an unknown tensor", "microbatches", dim(q=0), tensor="q"),
    row("beyond the dimensions", "microbatches", dim(x=2), tensor="x"),
    row("uneven", "microbatches", microbatches(3), tensor="x"),
    row("of a scalar", "microbatches", dim(lr=0), tensor="lr"),
    row("the second one's rows", "microbatches", second_microbatch("inputs", "x"), tensor="x"),
    row("both readers", "microbatches", lr_in_the_forward, "d1.U.0", "lr@d1"),
    row("an output that is not cut", "microbatches", uncut("prediction"), "d1.F1.0", "y"),
    row("read elsewhere", "replaces", gradient_instead, tensor="g2'"),
    row("replaced by the preparation", "replaces", prepared, tensor="count"),
)


def test_labels_that_only_the_preparation_reads_are_whole() -> None:
    document = training_step()
    piece = document.metadata.tensor_slices.inputs["labels"]
    assert piece.placements == ((0, 4), (0, 2))
    check(document)


@pytest.mark.parametrize("case", [*PHASES, *MICROBATCHES])
def test_broken(case: Broken) -> None:
    prove_broken(case)
