import torch

from shardwright.ir import SLOT, Builder, Input, Source
from shardwright.ir.graph import format_attribute, format_scopes


def test_a_graph_reads_at_a_glance():
    builder = Builder("mlp")
    x = builder.input("x", (4, 8), strides=(1, 4), device="cuda:0")
    weight = builder.param("fc.weight", torch.zeros(16, 8), names=("fc.weight", "tied"))
    part = builder.buffer("rows", torch.zeros(4, 16), placements=[(0, 4), (0, 16)])
    with builder.scope("fc", "torch.nn.Linear"), builder.scope("fc.0", "my.Mine"):
        y = builder.emit(
            "aten.linear.default", [x, weight], {"bias": None}, source=Source("mlp.py", 12)
        )
    total = builder.call("aten.add.Tensor", part, y)
    graph = builder.finish([y, total], updates={part.id: total.id})
    assert str(graph) == (
        "graph mlp\n"
        "input %x: f32[4, 8]{1, 4}@cuda:0\n"
        'param %fc.weight: f32[16, 8] = "fc.weight", "tied"\n'
        'buffer %rows: f32[4, 16] = "rows" [0:4, 0:16]\n'
        "in fc:torch.nn.Linear > fc.0:my.Mine\n"
        "  %linear!: f32[4, 16]@cuda:0 = aten.linear.default(%x, %fc.weight, bias=None)"
        "  # mlp.py:12\n"
        "in -\n"
        "  %add!: f32[4, 16] = aten.add.Tensor(%rows, %linear, alpha=1)\n"
        "return %linear, %add\n"
        "update %rows = %add\n"
        'arguments {"parameters":[{"name":"x","kind":"POSITIONAL_OR_KEYWORD",'
        '"value":{"type":"tensor","name":"x","index":0}}]}\n'
        'result {"type":"tuple","items":[{"type":"tensor","name":"output_0","index":0},'
        '{"type":"tensor","name":"output_1","index":1}]}\n'
    )


def test_attributes_read_as_python():
    written = {
        "None": None,
        "-3": -3,
        "1e-05": 1e-05,
        "-inf": float("-inf"),
        "nan": float("nan"),
        "complex(-0.0, inf)": complex(-0.0, float("inf")),
        '"say \\"hi\\""': 'say "hi"',
        "torch.bfloat16": torch.bfloat16,
        "torch.channels_last": torch.channels_last,
        "torch.strided": torch.strided,
        "slot": SLOT,
        "[None, %b, [True]]": [None, Input(1), [True]],
    }
    for text, value in written.items():
        assert format_attribute(value, ["%a", "%b"]) == text


def test_places_without_a_tensor_are_underscores():
    builder = Builder("g")
    x = builder.input("x", (1, 2, 4))
    weight = builder.input("w", (2, 2, 1))
    like = ([1], [0], [1], False, [0], 1)
    mask = [False, True, False]
    _, made, _ = builder.call("aten.convolution_backward.default", x, x, weight, None, *like, mask)
    graph = builder.finish(made)
    line = str(graph).split("\n")[3]
    assert line.startswith("  _, %convolution_backward!: f32[2, 2, 1], _ = aten.convolution_back")


def test_odd_scopes_stand_in_quotes():
    assert format_scopes(()) == "-"
    assert format_scopes((("", "M"), ("a:b", "<locals>.M > N"))) == (
        '"":M > "a:b":"<locals>.M > N"'
    )
