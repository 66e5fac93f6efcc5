from collections.abc import Callable

import pytest

from shardwright.ir.tensor_meta import count_text
from shardwright.pipeline.schema import Document
from shardwright.reporting.overview import communication_table, overview, slots_text

Draw = Callable[..., str]

OVERVIEW = """\
layers  2 device slots, 7 supertasks, 8 tensors, 3 constants of 768 B

Device slots
slot  device     tasks  operators  constants  weights  sends  receives
──────────────────────────────────────────────────────────────────────
d0    cpu:0          3          4          2    512 B  128 B       0 B
d1    far/cpu:1      2          2          1    256 B    0 B     128 B

Communication
group  kind       slots    tensor  type       times  bytes
──────────────────────────────────────────────────────────
g0     send/recv  d0 → d1  h1      f32[4, 8]      1  128 B

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


SPLIT_COMMUNICATION = """
Communication
group  kind        slots    tensor   type                   times  bytes
────────────────────────────────────────────────────────────────────────
g0 …   all_gather  d0 … d3  a0@d0 …  f32[2, 8] → f32[8, 8]      3  768 B
"""


def test_overview(document: Document, drawn: Draw) -> None:
    assert drawn(overview(document)) == OVERVIEW.strip()


def test_communication_of_equal_layers_shares_a_row(split: Document, drawn: Draw) -> None:
    assert drawn(communication_table(split)) == SPLIT_COMMUNICATION.strip()


def test_names_are_not_read_as_markup(document: Document, drawn: Draw) -> None:
    document.name = "[red]odd[/red]"
    assert "[red]odd[/red]" in drawn(overview(document))


def test_count() -> None:
    assert (count_text(1, "tensor"), count_text(2, "tensor")) == ("1 tensor", "2 tensors")
    assert (count_text(1, "batch"), count_text(0, "batch")) == ("1 batch", "0 batches")


@pytest.mark.parametrize(
    ("slots", "text"),
    [
        (["d0"], "d0"),
        (["d0", "d1", "d2"], "d0, d1, d2"),
        (["d1", "d2", "d3", "d4"], "d1 … d4"),
        (["d0", "d2", "d4", "d6"], "d0, d2, d4, d6"),
    ],
)
def test_slots(slots: list[str], text: str) -> None:
    assert slots_text(slots, [f"d{i}" for i in range(8)]) == text
