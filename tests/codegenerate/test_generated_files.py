"""Generated files, whole: against eager, with checkpoints, copies and ties; and what they say."""

import copy
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shardwright as sw
from shardwright.errors import CodegenError
from tests.codegenerate.checkers import assert_passes_mypy, assert_passes_ruff
from tests.codegenerate.written import configured, cut, run, stages, written

WIDTH = 8


class Block(nn.Module):
    """A residual block with a layer that is called twice."""

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.scale = scale
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.act = nn.Tanh()
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.gain = nn.Parameter(torch.full((WIDTH,), 0.7))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        hidden = self.act(self.up(self.norm(x)))
        hidden = self.act(self.down(hidden))
        hidden = torch.matmul(mask, hidden)
        return x + hidden * self.gain * self.scale


class Language(nn.Module):
    """Tied ends, equal blocks, a buffer that no checkpoint holds."""

    def __init__(self, layers: int = 5) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(layers)])
        self.head = nn.Linear(WIDTH, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("mask", torch.ones(4, 4).tril() / 4, persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, self.mask)
        return self.head(x)


class Normed(nn.Module):
    """Layers whose buffers change, in a Sequential, and a counter of the model's own."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
        self.head = nn.Linear(4, 2)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, image: Tensor) -> Tensor:
        self.calls += 1
        return self.head(self.net(image).mean((2, 3)))


class Twice(nn.Module):
    """A module whose parts are used on both sides of another's work."""

    def __init__(self) -> None:
        super().__init__()
        self.pair = Pair()
        self.middle = nn.Linear(WIDTH, WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.lists = nn.ParameterList([torch.ones(WIDTH), torch.zeros(WIDTH)])

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.middle(self.pair(x))
        x = self.pair(x) * self.lists[0] + self.lists[1]
        return self.frozen(x), x.sum()


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x) * self.weight


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(0.5)
        self.second = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(self.first(x), 0.3, training=self.training)
        return self.second(self.drop(x)) + torch.rand_like(x)


def tokens() -> tuple[Tensor]:
    return (torch.arange(8).reshape(2, 4) % 11,)


def rows() -> tuple[Tensor]:
    return (torch.linspace(-1, 1, 3 * WIDTH, dtype=torch.float64).reshape(3, WIDTH),)


def images() -> tuple[Tensor]:
    return (torch.linspace(-1, 1, 2 * 3 * 5 * 5, dtype=torch.float64).reshape(2, 3, 5, 5),)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[Tensor]]]] = {
    "language": (Language, tokens),
    "normed": (Normed, images),
    "twice": (Twice, rows),
    "noisy": (Noisy, rows),
}


def made(name: str, *, training: bool) -> tuple[nn.Module, tuple[Tensor], sw.IRGraph]:
    torch.manual_seed(0)
    build, inputs = MODELS[name]
    model = build().double().train(training)
    return model, inputs(), sw.capture(model, inputs())


def results(model: nn.Module, args: tuple[Tensor]) -> list[Tensor]:
    found = model(*args)
    return list(found) if isinstance(found, tuple) else [found]


def gradients(values: list[Tensor], model: nn.Module) -> list[Tensor | None]:
    total = torch.stack([value.square().sum() for value in values]).sum()
    wanted = [p for p in model.parameters() if p.requires_grad]
    return list(torch.autograd.grad(total, wanted, allow_unused=True))


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("verbose", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_results_gradients_and_buffers_are_eagers(
    name: str, verbose: bool, training: bool, tmp_path: Path
) -> None:
    model, args, graph = made(name, training=training)
    for places in ((), (len(graph.nodes) // 2,), (1, len(graph.nodes) - 1)):
        module = written(graph, cut(graph, places), tmp_path, verbose=verbose)
        ours, eager = copy.deepcopy(model), copy.deepcopy(model)
        configuration = configured(module, ours)
        inputs = dict(zip(configuration["model inputs"], args, strict=True))
        torch.manual_seed(1)
        found = run(configuration, inputs)
        values = [found[output] for output in configuration["model outputs"]]
        torch.manual_seed(1)
        expected = results(eager, args)
        assert all(map(torch.equal, values, expected))
        for one, other in zip(gradients(values, ours), gradients(expected, eager), strict=True):
            assert (one is None) == (other is None)
            assert one is None or other is None or torch.equal(one, other)
        for key, tensor in eager.state_dict().items():
            assert torch.equal(ours.state_dict()[key], tensor), key


@pytest.mark.parametrize("name", MODELS)
def test_states_have_the_originals_names_and_load_its_checkpoint(name: str, tmp_path: Path) -> None:
    model, args, graph = made(name, training=False)
    module = written(graph, cut(graph, [len(graph.nodes) // 2]), tmp_path)
    parts = stages(configured(module))
    keys = {key for part in parts for key in part.state_dict()}
    assert keys == set(model.state_dict())
    named = {key for part in parts for key, _ in part.named_parameters()}
    assert named == {key for key, _ in model.named_parameters()}
    for part in parts:
        own = {key: model.state_dict()[key] for key in part.state_dict()}
        part.load_state_dict(own)
        missing = part.load_state_dict(model.state_dict(), strict=False).missing_keys
        assert missing == []
    configuration = configured(module)
    for part, loaded in zip(stages(configuration), parts, strict=True):
        part.load_state_dict(loaded.state_dict())
        part.double()
    inputs = dict(zip(configuration["model inputs"], args, strict=True))
    torch.manual_seed(1)
    found = run(configuration, inputs)
    torch.manual_seed(1)
    expected = results(model, args)
    for output, tensor in zip(configuration["model outputs"], expected, strict=True):
        assert torch.equal(found[output], tensor)


def test_stages_have_the_models_own_tensors_and_copies_have_their_own(tmp_path: Path) -> None:
    model, _, graph = made("language", training=True)
    module = written(graph, cut(graph, []), tmp_path)
    (stage,) = stages(configured(module, model))
    assert stage.training
    ours, originals = dict(stage.named_parameters()), dict(model.named_parameters())
    assert all(ours[key] is originals[key] for key in originals)
    assert stage.head.weight is stage.embed.weight
    twin = copy.deepcopy(stage)
    assert twin.head.weight is twin.embed.weight
    assert twin.head.weight is not stage.head.weight
    only = module.create_pipeline_configuration(model, partitions_only=True, debug=True)
    assert list(only) == [0]
    assert not only[0].eval().training


def test_a_model_that_lacks_a_tensor_is_refused(tmp_path: Path) -> None:
    _, _, graph = made("language", training=False)
    module = written(graph, cut(graph, []), tmp_path)
    with pytest.raises(ValueError, match=r"the model has no 'blocks\.3\."):
        configured(module, Language(3).double())


def test_frozen_parameters_are_frozen(tmp_path: Path) -> None:
    model, _, graph = made("twice", training=False)
    (stage,) = stages(configured(written(graph, cut(graph, []), tmp_path)))
    ours = {key: p.requires_grad for key, p in stage.named_parameters()}
    assert ours == {key: p.requires_grad for key, p in model.named_parameters()}


# --- how it reads ---------------------------------------------------------------------------------


def text_of(graph: sw.IRGraph, places: tuple[int, ...], folder: Path, **options: bool) -> str:
    path = folder / "text.py"
    assert sw.codegen(cut(graph, places), path, graph=graph, **options) == path
    return path.read_text()


def test_equal_blocks_are_one_class_and_a_loop(tmp_path: Path) -> None:
    _, _, graph = made("language", training=False)
    text = text_of(graph, (), tmp_path)
    assert re.findall(r"^class (\w+)", text, re.MULTILINE) == ["Block", "Stage0"]
    assert "nn.ModuleDict({str(i): Block() for i in range(5)})" in text
    assert "for block in self.blocks.values():\n            x = block(x, self.mask)" in text
    assert "self.head.weight = self.embed.weight" in text
    assert "self.norm = nn.LayerNorm(8, dtype=torch.float64)" in text


def test_statements_say_where_they_came_from(tmp_path: Path) -> None:
    _, _, graph = made("language", training=False)
    text = text_of(graph, (), tmp_path)
    found = re.search(
        r"# (test_generated_files\.py):(\d+)  (hidden = torch\.matmul\(mask, hidden\))", text
    )
    assert found
    line = Path(__file__).read_text().splitlines()[int(found[2]) - 1]
    assert line.strip() == found[3]
    assert str(Path(__file__).parent) not in text


def test_verbose_puts_each_operator_on_a_line(tmp_path: Path) -> None:
    _, _, graph = made("language", training=False)
    nested, spread = text_of(graph, (), tmp_path), text_of(graph, (), tmp_path, verbose=True)
    assert "self.act(self.up(self.norm(x)))" in nested
    code = re.sub(r"#.*", "", spread)
    assert not re.search(r"self\.\w+\(self\.\w+\(", code)


def test_a_module_that_is_left_and_entered_again_only_holds(tmp_path: Path) -> None:
    _, _, graph = made("twice", training=False)
    text = text_of(graph, (), tmp_path)
    pair = text.split("class Pair(nn.Module):")[1].split("\nclass ")[0]
    assert "def forward" not in pair
    assert "self.pair.first(" in text
    assert "self.pair.weight" in text


def test_a_sequential_is_one(tmp_path: Path) -> None:
    _, _, graph = made("normed", training=True)
    text = text_of(graph, (), tmp_path)
    assert "self.net = nn.Sequential(" in text
    assert "self.calls.copy_(" in text


def test_the_file_is_the_same_each_time(tmp_path: Path) -> None:
    _, _, graph = made("noisy", training=True)
    assert text_of(graph, (2,), tmp_path) == text_of(graph, (2,), tmp_path)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("files")
    found = []
    for name in MODELS:
        for training in (False, True):
            _, _, graph = made(name, training=training)
            for verbose in (False, True):
                path = folder / f"{name}_{training}_{verbose}.py".lower()
                plan = cut(graph, [len(graph.nodes) // 2])
                sw.codegen(plan, path, verbose, graph)
                found.append(path)
    return found


def test_files_are_clean_for_ruff(files: list[Path]) -> None:
    assert_passes_ruff(files)


@pytest.mark.timeout(600)
def test_files_are_clean_for_mypy(files: list[Path]) -> None:
    assert_passes_mypy(files)


def test_files_import_torch_and_the_standard_library_only(files: list[Path]) -> None:
    for path in files:
        names = set(re.findall(r"^(?:import|from) (\w+)", path.read_text(), re.MULTILINE))
        assert names <= {"__future__", "collections", "math", "torch", "typing", "warnings"}


def test_other_things_are_no_pipeline(tmp_path: Path) -> None:
    with pytest.raises(CodegenError, match="from a Pipeline or a Plan, found a str"):
        sw.codegen("plan", tmp_path / "x.py")  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []
