"""Layers that are equal but for constants are one class, whose constructor takes these."""

import re
from functools import cache
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import shardwright as sw
from shardwright.codegenerate.writing.classes import ClassText, Defined
from shardwright.codegenerate.writing.merging import MOST_ARGUMENTS, merged
from shardwright.ir import IRGraph
from shardwright.planning.plan import Plan
from tests.codegenerate.checkers import assert_passes_mypy, assert_passes_ruff
from tests.codegenerate.test_round_trip import assert_comes_back
from tests.codegenerate.written import configured, run, stages, written

# --- texts ----------------------------------------------------------------------------------------


def texts(*classes: ClassText, own: ClassText | None = None) -> str:
    """What becomes of classes ``Layer``, ``Layer2``, … and of one of its own that uses them."""
    numbers = range(1, len(classes) + 1)
    names = ["Layer" if number == 1 else f"Layer{number}" for number in numbers]
    given = [Defined(name, text) for name, text in zip(names, classes, strict=True)]
    if own is not None:
        given.append(Defined("Stage0", own, is_own=True))
    return "\n".join(one.text.text(one.name) for one in merged(given, ("Stage0",)))


def layer(*init: str, forward: str = "return x", stem: str = "Layer", doc: str = "") -> ClassText:
    lines = ("def forward(self, x: Tensor) -> Tensor:", f"    {forward}")
    return ClassText(stem, (doc,) if doc else (), (), (), init, lines)


def stage(*init: str) -> ClassText:
    return ClassText("Stage0", (), (), (), init, ())


def headers(text: str) -> list[str]:
    """``Layer(in_features: int)`` of each class."""
    pattern = r"^class (\w+)\(.*\n(?:(?!class).*\n)*?    def \w+\(self(?:, (.*))?\) ->"
    return [f"{name}({taken})" for name, taken in re.findall(pattern, text, re.MULTILINE)]


def test_what_differs_is_an_argument_and_defaults_are_torchs() -> None:
    text = texts(
        layer("self.conv = nn.Conv2d(3, 8, kernel_size=1)"),
        layer("self.conv = nn.Conv2d(8, 16, kernel_size=1, stride=2)"),
        layer("self.conv = nn.Conv2d(8, 8, kernel_size=1)"),
        own=stage("self.a = Layer()", "self.b = Layer2()", "self.c = Layer3()"),
    )
    assert headers(text)[0] == "Layer(in_channels: int, out_channels: int, stride: int = 1)"
    assert "nn.Conv2d(in_channels, out_channels, kernel_size=1, stride=stride)" in text
    assert "self.a = Layer(3, 8)\n" in text
    assert "self.b = Layer(8, 16, stride=2)\n" in text
    assert "self.c = Layer(8, 8)\n" in text
    assert "self.stride" not in text


def test_what_the_forward_needs_is_an_attribute() -> None:
    text = texts(
        layer("self.up = nn.Linear(4, 8)", forward="return self.up(x).view(2, 8) * 0.5"),
        layer("self.up = nn.Linear(4, 6)", forward="return self.up(x).view(2, 6) * 0.25"),
        own=stage("self.a = Layer()", "self.b = Layer2()"),
    )
    assert headers(text)[0] == "Layer(out_features: int, scale: float)"
    assert "return self.up(x).view(2, self.out_features) * self.scale" in text
    assert "self.out_features = out_features\n" in text
    assert "self.b = Layer(6, scale=0.25)\n" in text


def test_kernels_may_be_numbers_or_pairs() -> None:
    text = texts(
        layer("self.conv = nn.Conv2d(4, 4, kernel_size=(1, 7), padding=(0, 3))"),
        layer("self.conv = nn.Conv2d(4, 4, kernel_size=3, padding=1)"),
        own=stage("self.a = Layer()", "self.b = Layer2()"),
    )
    assert "kernel_size: int | tuple[int, int], padding: int | tuple[int, int] = 0" in text
    assert "self.a = Layer(kernel_size=(1, 7), padding=(0, 3))\n" in text


def test_outer_classes_give_inner_ones_what_they_take() -> None:
    text = texts(
        layer("self.fc = nn.Linear(4, 16)", stem="Inner"),
        layer("self.inner = Layer()", "self.out = nn.Linear(16, 4)"),
        layer("self.fc = nn.Linear(6, 24)", stem="Inner"),
        layer("self.inner = Layer3()", "self.out = nn.Linear(24, 6)"),
        own=stage("self.a = Layer2()", "self.b = Layer4()"),
    )
    assert headers(text) == [
        "Inner(in_features: int, out_features: int)",
        "Layer(features: int, hidden_features: int)",
        "Stage0()",
    ]
    assert "self.inner = Inner(features, hidden_features)\n" in text
    assert "self.b = Layer(6, 24)\n" in text


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (layer("self.a = nn.Linear(4, 8)"), layer("self.a = nn.Bilinear(4, 8, 8)")),
        (layer("self.a = nn.Linear(4, 8)"), layer("self.b = nn.Linear(4, 8)")),
        (layer("self.a = nn.MaxPool2d(2)"), layer("self.a = nn.MaxPool2d(2, stride=1)")),
        (layer("self.a = nn.Linear(4, 8)"), layer("self.a = nn.Linear(4, 8, dtype=torch.half)")),
        (layer(forward="return x * 2"), layer(forward="return x * 2.0")),
        (layer(forward="return x.to(torch.int8)"), layer(forward="return x.to(torch.float16)")),
        (layer(forward="return x + 1"), layer(forward="return x - 1")),
        (layer(forward="return x[0]"), layer(forward="return x[0, 0]")),
        (layer(doc='"""Of a."""'), layer(doc='"""Of b."""')),
    ],
)
def test_other_differences_keep_classes_apart(one: ClassText, other: ClassText) -> None:
    assert headers(texts(one, other))[1].startswith("Layer2(")


@pytest.mark.parametrize("count", [MOST_ARGUMENTS, MOST_ARGUMENTS + 1])
def test_there_are_no_more_arguments_than_one_can_follow(count: int) -> None:
    def sizes(first: int) -> ClassText:
        return layer(*(f"self.a{i} = nn.LayerNorm({first + i})" for i in range(count)))

    assert len(headers(texts(sizes(10), sizes(30)))) == 1 + (count > MOST_ARGUMENTS)


@pytest.mark.parametrize(
    ("one", "other", "header"),
    [
        ("nn.Linear(4, 8)", "nn.Linear(6, 9)", "in_features: int, out_features: int"),
        ("nn.LayerNorm(4)", "nn.LayerNorm(6)", "width: int"),
        ("nn.Dropout(0.1)", "nn.Dropout(0.2)", "p: float = 0.5"),
        ("nn.Parameter(torch.empty(4, 8))", "nn.Parameter(torch.empty(5, 9))", "size: int, width"),
        ("nn.GELU()", 'nn.GELU(approximate="tanh")', "approximate: str = 'none'"),
    ],
)
def test_arguments_are_named_after_what_takes_them(one: str, other: str, header: str) -> None:
    (found,) = headers(texts(layer(f"self.a = {one}"), layer(f"self.a = {other}")))
    assert found.startswith(f"Layer({header}")


def test_names_are_none_that_the_class_has() -> None:
    text = texts(
        layer("self.scale = nn.Linear(4, 8)", forward="return self.scale(x) * 2.0"),
        layer("self.scale = nn.Linear(4, 8)", forward="return self.scale(x) * 3.0"),
    )
    assert headers(text) == ["Layer(scale_2: float)"]


def test_names_of_classes_follow_one_another() -> None:
    text = texts(
        layer("self.a = nn.Linear(4, 8)"),
        layer("self.a = nn.Linear(4, 9)"),
        layer("self.b = nn.Linear(4, 9)"),
        own=stage("self.c = Layer3()", "self.d = cast(Layer2, self.c)"),
    )
    assert [header.partition("(")[0] for header in headers(text)] == ["Layer", "Layer2", "Stage0"]
    assert "self.c = Layer2()" in text
    assert "cast(Layer, self.c)" in text


def test_comments_and_signs_of_other_alphabets_stay_where_they_are() -> None:
    def one(size: int) -> ClassText:
        comment = "    # ein Maß\n    y = x"
        return layer(f'self.register_buffer("maß", torch.ones({size}))', forward=comment)

    text = texts(one(3), one(14))
    assert 'self.register_buffer("maß", torch.ones(width))' in text
    assert "    # ein Maß\n" in text


# --- files ----------------------------------------------------------------------------------------


class Dense(nn.Module):
    """A layer with a number of its own beside its sizes."""

    def __init__(self, into: int, out: int, scale: float) -> None:
        super().__init__()
        self.linear = nn.Linear(into, out)
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x)).view(2, -1, self.linear.out_features) * self.scale


class Convolved(nn.Module):
    """A convolution and a norm, as ResNets have."""

    def __init__(self, into: int, out: int, kernel: int) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(into, out, kernel, padding=kernel // 2, bias=False)
        self.norm = nn.BatchNorm2d(out)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norm(self.convolution(x)))


class Stack(nn.Module):
    """Layers after one another."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for each in self.layers:
            x = each(x)
        return x


def file_text(graph: IRGraph, plan: Plan, folder: Path) -> str:
    return sw.codegen(plan, folder / "text.py", graph=graph).read_text()


def classes_of(text: str, stem: str) -> list[str]:
    return re.findall(rf"^class ({stem}\d*)\(", text, re.MULTILINE)


def assert_computes_the_same(model: nn.Module, graph: IRGraph, x: Tensor, folder: Path) -> None:
    """Outputs, gradients and states in two stages, bit for bit."""
    plan = sw.plan(graph, 2)
    expected = model(x)
    expected.sum().backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    configuration = configured(written(graph, plan, folder), model)
    found = run(configuration, {graph.values[graph.inputs[0]].name: x})
    assert torch.equal(found[graph.output_names[0]], expected)
    found[graph.output_names[0]].sum().backward()
    assert all(torch.equal(p.grad, gradients[name]) for name, p in model.named_parameters())
    saved = {key for each in stages(configuration) for key in each.state_dict()}
    assert saved == model.state_dict().keys()


SIZES = st.lists(st.integers(1, 999), min_size=3, max_size=6)


@settings(max_examples=5, deadline=None)
@given(SIZES, st.lists(st.floats(0.1, 2), min_size=5, max_size=5))
def test_linear_layers_of_any_sizes_are_one_class(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], scales: list[float]
) -> None:
    folder = tmp_path_factory.mktemp("stack")
    pairs = zip(sizes[:-1], sizes[1:], scales, strict=False)
    model = Stack([Dense(into, out, scale) for into, out, scale in pairs]).double().eval()
    x = torch.randn(2, 3, sizes[0], dtype=torch.float64)
    graph = sw.capture(model, (x,))
    assert classes_of(file_text(graph, sw.plan(graph, 1), folder), "Dense") == ["Dense"]
    assert_computes_the_same(model, graph, x, folder)
    assert_comes_back(model, graph, sw.plan(graph, 1), {"x": x}, folder)


@settings(max_examples=5, deadline=None)
@given(
    st.lists(st.integers(1, 12), min_size=3, max_size=6),
    st.lists(st.sampled_from([1, 3, 5]), min_size=5, max_size=5),
)
def test_convolutions_of_any_sizes_are_one_class(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], kernels: list[int]
) -> None:
    folder = tmp_path_factory.mktemp("stack")
    triples = zip(sizes[:-1], sizes[1:], kernels, strict=False)
    model = Stack([Convolved(*sizes) for sizes in triples]).double().train()
    x = torch.randn(2, sizes[0], 6, 6, dtype=torch.float64)
    graph = sw.capture(model, (x,))
    assert classes_of(file_text(graph, sw.plan(graph, 1), folder), "Convolved") == ["Convolved"]
    model.eval()
    graph = sw.capture(model, (x,))
    assert_computes_the_same(model, graph, x, folder)


ROOT = Path(__file__).parents[2]


class Bottleneck(nn.Module):
    """Three convolutions, and one beside them where shapes change."""

    def __init__(self, into: int, middle: int, out: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(into, middle, 1, bias=False)
        self.second = nn.Conv2d(middle, middle, 3, stride, 1, bias=False)
        self.third = nn.Conv2d(middle, out, 1, bias=False)
        self.shortcut = nn.Conv2d(into, out, 1, stride) if (into, stride) != (out, 1) else None

    def forward(self, x: Tensor) -> Tensor:
        y = self.third(F.relu(self.second(F.relu(self.first(x)))))
        return F.relu(y + (x if self.shortcut is None else self.shortcut(x)))


def resnet() -> nn.Module:
    sizes = [(8, 4, 16, 1), (16, 4, 16, 1), (16, 6, 24, 2), (24, 6, 24, 1), (24, 8, 32, 2)]
    return Stack([Bottleneck(*each) for each in sizes]).double().eval()


@pytest.mark.parametrize("verbose", [False, True])
def test_bottlenecks_are_one_class_with_a_shortcut_and_one_without(
    verbose: bool, tmp_path: Path
) -> None:
    model, x = resnet(), torch.randn(2, 8, 8, 8, dtype=torch.float64)
    graph = sw.capture(model, (x,))
    path = sw.codegen(sw.plan(graph, 1), tmp_path / "resnet.py", verbose, graph)
    text = path.read_text()
    assert classes_of(text, "Bottleneck") == ["Bottleneck", "Bottleneck2"]
    arguments = "in_channels: int, hidden_channels: int, out_channels: int, stride: int = 1"
    assert arguments in " ".join(text.split())
    made = "Bottleneck(16, 6, 24, stride=2)"
    assert made in text
    assert made in (ROOT / "docs" / "codegen.md").read_text()
    assert_passes_ruff([path])
    assert_passes_mypy([path])
    assert_computes_the_same(model, graph, x, tmp_path)
    assert_comes_back(model, graph, sw.plan(graph, 2), {"x": x}, tmp_path)


class Shifted(nn.Module):
    """Constants of each type, most of them in its forward."""

    def __init__(self, dim: int, affine: bool, mode: str, dtype: torch.dtype, size: int) -> None:
        super().__init__()
        self.gelu, self.linear = nn.GELU(mode), nn.Linear(4, 4, bias=affine)
        self.dim, self.to_dtype, self.size = dim, dtype, size

    def forward(self, x: Tensor) -> Tensor:
        x = x + x.mean(self.dim, keepdim=True).to(self.to_dtype).to(torch.float64)
        x = self.gelu(self.linear(x)) ** float(self.size)
        return x + torch.softmax(x, self.dim)[:, self.size : self.size + 1]


def test_constants_of_all_types_pass_checks(tmp_path: Path) -> None:
    layers = [
        Shifted(1, True, "none", torch.float16, 1),
        Shifted(2, False, "tanh", torch.float32, 2),
    ]
    model, x = Stack(layers).double(), torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
    graph = sw.capture(model, (x,))
    path = sw.codegen(sw.plan(graph, 1), tmp_path / "shifted.py", graph=graph)
    text = path.read_text()
    assert classes_of(text, "Shifted") == ["Shifted"]
    assert set(re.findall(r"^    +\w+: ([a-z.]+)(?: = \S+)?,$", text, re.MULTILINE)) == {
        "bool",
        "float",
        "int",
        "str",
        "torch.dtype",
    }
    assert_passes_ruff([path])
    assert_passes_mypy([path])
    assert_comes_back(model, graph, sw.plan(graph, 1), {"x": x}, tmp_path)


# --- whole models ---------------------------------------------------------------------------------


@pytest.mark.zoo
@pytest.mark.filterwarnings("ignore::Warning:transformers")
@pytest.mark.parametrize(
    ("name", "counts"),
    [
        ("resnet", {"ResNetConvLayer": 2, "ResNetShortCut": 1, "ResNetBottleNeckLayer": 2}),
        ("convnext", {"ConvNextLayerNorm": 2, "ConvNextLayer": 1}),
        ("gpt2", {"Conv1D": 1, "GPT2Block": 1}),
    ],
)
def test_models_of_the_zoo_have_few_classes(
    name: str, counts: dict[str, int], tmp_path: Path
) -> None:
    pytest.importorskip("transformers")
    from zoo.models import BY_NAME

    model, _, inputs = BY_NAME[name].make()
    graph = sw.capture(model, (), inputs, name=name)
    text = file_text(graph, sw.plan(graph, 1), tmp_path)
    assert {stem: len(classes_of(text, stem)) for stem in counts} == counts
    assert len(classes_of(text, r"\w+?")) <= 12


@cache
def gpt2() -> IRGraph:
    """GPT-2 as large as it is, without contents."""
    transformers = pytest.importorskip("transformers")
    with sw.empty_weights():
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(use_cache=False)).eval()
    return sw.capture(model, (), {"input_ids": torch.zeros(1, 32, dtype=torch.int64)})


@pytest.mark.zoo
@pytest.mark.filterwarnings("ignore::Warning:transformers")
@pytest.mark.parametrize(("stages", "verbose"), [(1, False), (1, True), (2, False)])
def test_gpt2_is_short(stages: int, verbose: bool, tmp_path: Path) -> None:
    graph = gpt2()
    path = sw.codegen(sw.plan(graph, stages), tmp_path / "gpt2.py", verbose, graph)
    text = path.read_text()
    assert len(text.splitlines()) < 1200
    pieces = 2 * (stages - 1)
    assert len(classes_of(text, "GPT2Block")) <= 1 + pieces, "a cut goes through a block"
    assert classes_of(text, "Conv1D") == ["Conv1D"]
    assert "Conv1D(768, 2304)" in text


def test_a_stride_is_no_dilation() -> None:
    """Numbers that are equal by chance stay apart; sizes that are equal belong together."""
    convolution = "self.own = nn.Conv2d({0}, {0}, 3, stride={1}, dilation={1}, bias=False)"
    found = texts(*(layer(convolution.format(size, step)) for size, step in ((4, 1), (8, 2))))
    assert headers(found) == ["Layer(channels: int, stride: int = 1, dilation: int = 1)"]


def test_no_argument_is_called_as_a_modules_mode() -> None:
    forward = "return F.dropout(x, p=0.5, training={})"
    found = texts(*(layer(forward=forward.format(mode)) for mode in (True, False)))
    assert headers(found) == ["Layer(training_2: bool)"]
