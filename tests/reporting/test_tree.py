from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from shardwright.pipeline.schema import Document
from shardwright.reporting.overview import TaskRun, runs, supertask_tree

Draw = Callable[..., str]


def test_layers_that_run_different_graphs_have_lines_of_their_own(
    document: Document, drawn: Draw
) -> None:
    task = document.supertasks["d0.1"]
    document.supertasks["d0.1"] = type(task)(
        "FX", task.inputs, task.outputs, task.device, data=(document.blobs or {})["layer"]
    )
    text = drawn(supertask_tree(document))
    assert "d0.0  FX 2 operators, 1 constant of 256 B: x → h0" in text
    assert "d0.1  FX 2 operators, 1 constant of 256 B: h0 → h1" in text


def test_long_lists_of_tensors_end_in_a_count(document: Document, drawn: Draw) -> None:
    names = tuple(f"y{i}" for i in range(7))
    document.tensors |= dict.fromkeys(names, document.tensors["y"])
    task = document.supertasks["d1.0"]
    document.supertasks["d1.0"] = type(task)("FX", task.inputs, names, "d1", data_blob="layer")
    assert "→ y0, y1, y2, y3 and 3 more" in drawn(supertask_tree(document))


def test_slots_that_work_alike_share_a_branch_and_layers_stand_once(
    split: Document, drawn: Draw
) -> None:
    assert (
        drawn(supertask_tree(split))
        == """\
split
├── inputs
│   └── x@d0 … f32[8, 8] on d0 … d3, all of x
├── d0  cpu:0, likewise on d1, d2, d3
│   └── 3 times, the first:
│       ├── d0.0  FX 2 operators, 1 constant of 64 B: x@d0 → a0@d0
│       └── g0.d0  all_gather ↔ d1, d2, d3: a0@d0 → h0@d0 f32[8, 8]
└── outputs
    ├── h2@d0 f32[8, 8] on d0, output[0:2, :]
    ├── h2@d1 f32[8, 8] on d1, output[2:4, :]
    ├── h2@d2 f32[8, 8] on d2, output[4:6, :]
    └── h2@d3 f32[8, 8] on d3, output[6:8, :]"""
    )


def test_slots_that_read_other_weights_do_not_work_alike(split: Document, drawn: Draw) -> None:
    split.tensors["w0@d3"].value.name = "other"
    text = drawn(supertask_tree(split))
    assert "d0  cpu:0, likewise on d1, d2" in text
    assert "├── d3  cpu:3" in text


def test_runs_are_the_longest_from_each_place() -> None:
    assert list(runs("abcabcabcx")) == [TaskRun(0, 3, 3), TaskRun(9, 1, 1)]
    assert list(runs("xaabaab")) == [TaskRun(0, 1, 1), TaskRun(1, 3, 2)]
    assert list(runs("aaaa")) == [TaskRun(0, 1, 4)]
    assert list(runs("")) == []


@given(st.lists(st.sampled_from("abc"), max_size=30))
def test_runs_cover_a_sequence(keys: list[str]) -> None:
    whole = [
        key for run in runs(keys) for key in keys[run.start : run.start + run.period] * run.times
    ]
    assert whole == keys
