"""``shardwright codegen``."""

import ast
import re
from pathlib import Path

import pytest
import torch

from tests.cli.commands import refused, succeed
from tests.codegenerate.written import imported

pytestmark = pytest.mark.usefixtures("program_folder")


def layers() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(4)])


def outputs(file: str, x: torch.Tensor) -> torch.Tensor:
    """What the stages of a file make with the model's weights."""
    stages = imported(Path(file)).create_pipeline_configuration(layers(), partitions_only=True)
    for stage in stages.values():
        x = stage(x)
    return x


@pytest.mark.parametrize("options", [("--devices", 2), ("--policy", "metis")])
def test_it_writes_the_partitions_of_a_model(options: tuple[object, ...]) -> None:
    printed = succeed("codegen", "user_program.py:make", *options, "-o", "stages.py")
    lines = len(Path("stages.py").read_text().splitlines())
    assert printed == f"stages.py: {lines} lines, Stage0, Stage1\n"
    x = torch.randn(4, 8)
    assert torch.equal(outputs("stages.py", x), layers()(x))


def test_it_follows_a_plan() -> None:
    succeed("plan", "user_program.py:make", "--devices", 4, "-o", "plan.json")
    printed = succeed("codegen", "user_program.py:make", "--plan", "plan.json", "-o", "stages.py")
    assert printed.endswith("Stage0, Stage1, Stage2, Stage3\n")


def test_verbose_writes_an_operator_a_line() -> None:
    Path("user_program.py").write_text(
        "import torch\n"
        "class Sines(torch.nn.Module):\n"
        "    def forward(self, x):\n"
        "        return torch.sin(torch.cos(torch.tanh(x)))\n"
        "def make():\n"
        "    return Sines(), (torch.ones(3),), {}\n"
    )
    statements = {}
    for name, options in (("short.py", ()), ("long.py", ("--verbose",))):
        succeed("codegen", "user_program.py:make", "--devices", 1, *options, "-o", name)
        tree = ast.parse(Path(name).read_text())
        (stage,) = (n for n in ast.walk(tree) if isinstance(n, ast.ClassDef) and n.name == "Stage0")
        (forward,) = (
            n for n in stage.body if isinstance(n, ast.FunctionDef) and n.name == "forward"
        )
        statements[name] = len(forward.body)
        assert torch.equal(outputs(name, torch.ones(3)), torch.ones(3).tanh().cos().sin())
    assert statements["short.py"] < statements["long.py"]


def test_what_does_not_fit_is_refused() -> None:
    succeed("build", "user_program.py:make", "--devices", 2, "-o", "model.pipeline.json")
    words = ("codegen", "model.pipeline.json", "-o", "stages.py")
    assert "has tasks of devices, not the model's modules; name the program" in refused(*words)
    assert "there is no Python file no.py" in refused("codegen", "no.py:make", "-o", "stages.py")
    missing = refused("codegen", "user_program.py:make", "-o", "nowhere/stages.py")
    assert "nowhere/stages.py cannot be written: No such file or directory" in missing
    assert not Path("stages.py").exists()


def test_what_the_page_on_generated_code_shows_is_what_is_written() -> None:
    page = (Path(__file__).parents[2] / "docs" / "codegen.md").read_text()
    blocks = dict(re.findall(r"^```python (\w+\.py)\n(.*?)^```$", page, re.MULTILINE | re.DOTALL))
    Path("gpt.py").write_text(blocks["gpt.py"])
    succeed("codegen", "gpt.py:make", "--devices", 2, "-o", "stages.py")
    text = Path("stages.py").read_text()
    excerpts = [name for name in blocks if name.startswith("excerpt")]
    assert len(excerpts) == 2
    for name in excerpts:
        assert blocks[name] in text, name
