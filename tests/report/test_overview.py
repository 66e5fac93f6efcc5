from collections.abc import Callable

from shardwright.pipeline.schema import Document
from shardwright.report.overview import overview, slice_text, supertask_tree

Draw = Callable[..., str]

OVERVIEW = """\
layers  2 device slots, 7 supertasks, 8 tensors, 3 constants of 768 B

Device slots
slot  device     tasks  operators  constants  weights  sends  receives
──────────────────────────────────────────────────────────────────────
d0    cpu:0          3          4          2    512 B  128 B       0 B
d1    far/cpu:1      2          2          1    256 B    0 B     128 B

Communication
group  kind       slots    tensor  type       bytes
───────────────────────────────────────────────────
g0     send/recv  d0 → d1  h1      f32[4, 8]  128 B

layers
├── inputs
│   └── x f32[4, 8] on d0, all of x
├── d0  cpu:0
│   ├── d0.0 … d0.1  FX 2 × 2 operators, 2 constants of 512 B: x → h1
│   └── send.h1.d0.d1  send → d1: h1 f32[4, 8]
├── d1  far/cpu:1
│   ├── recv.h1.d0.d1  recv ← d0: h1@d1 f32[4, 8]
│   └── d1.0  FX 2 operators, 1 constant of 256 B: h1@d1 → y
└── outputs
    └── y f32[4, 8] on d1, all of output
"""


def test_overview(document: Document, drawn: Draw) -> None:
    assert drawn(overview(document)) == OVERVIEW.strip()


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


def test_a_part_of_a_tensor_is_written_as_a_slice() -> None:
    assert slice_text("x", ((0, 4), (0, 8)), (4, 8)) == "all of x"
    assert slice_text("x", ((2, 4), (0, 8)), (4, 8)) == "x[2:4, 0:8]"
    assert slice_text("x", (), ()) == "all of x"


def test_names_are_not_read_as_markup(document: Document, drawn: Draw) -> None:
    document.name = "[red]odd[/red]"
    assert "[red]odd[/red]" in drawn(overview(document))
