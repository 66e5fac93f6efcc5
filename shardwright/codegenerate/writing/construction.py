"""How the modules of a stage are made and reached: constructors, declarations, ties.

What a module holds is registered under the original's names, and a tensor of several names is one
object. A parameter holds nothing until a state is loaded or a model shares its own; a buffer holds
what it held in the model where that can be said in a line or is short; a constant always holds what
it should, or is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import torch
from torch import nn

from shardwright.codegenerate.spelling.forms import quoted
from shardwright.codegenerate.stages import Stage, StageProgram
from shardwright.codegenerate.writing.calls import Calls
from shardwright.codegenerate.writing.classes import DICTIONARY, MODULE
from shardwright.codegenerate.writing.contents import contents, empty, encoded
from shardwright.codegenerate.writing.layers import takes_gradient
from shardwright.codegenerate.writing.modules import Home, Module
from shardwright.codegenerate.writing.names import AMBIGUOUS, is_plain
from shardwright.errors import CodegenError
from shardwright.ir import IRGraph, IRValue
from shardwright.ir.tensor_meta import torch_dtype

SHORTEST = 3
"""Equal modules in a row that are worth a comprehension."""

Item = tuple[str, str]
"""A key, and what makes its module."""


def module_dict(items: Sequence[Item]) -> str:
    """A ModuleDict of these modules."""
    return f"nn.ModuleDict({_dictionary(items)})"


def _dictionary(items: Sequence[Item]) -> str:
    """A dict of these modules; equal ones in a row are a comprehension."""
    runs = _runs(items)
    if len(runs) == 1 and (one := _comprehension(runs[0])):
        return f"{{{one}}}"
    return f"{{{', '.join(map(_part, runs))}}}"


def number_range(keys: Sequence[str]) -> str | None:
    """``range(2, 6)`` for "2" to "5"; None where the keys are no such numbers."""
    if not all(key.isascii() and key.isdigit() and str(int(key)) == key for key in keys):
        return None
    start, stop = int(keys[0]), int(keys[-1]) + 1
    if [int(key) for key in keys] != list(range(start, stop)):
        return None
    return f"range({start}, {stop})" if start else f"range({stop})"


def parameter_dict(items: Sequence[Item]) -> str:
    """A ParameterDict."""
    return f"nn.ParameterDict({{{', '.join(f'{quoted(key)}: {made}' for key, made in items)}}})"


def sequential(items: Sequence[Item]) -> str:
    """A Sequential, of which there may be only a part."""
    keys = [key for key, _ in items]
    makers = [maker for _, maker in items]
    if keys != [str(i) for i in range(len(keys))]:
        return f"nn.Sequential(OrderedDict({_dictionary(items)}))"
    if len(set(makers)) == 1 and len(items) >= SHORTEST:
        return f"nn.Sequential(*({makers[0]} for _ in range({len(items)})))"
    return f"nn.Sequential({', '.join(makers)})"


def _runs(items: Sequence[Item]) -> list[list[Item]]:
    """Items split where what makes them changes, or their numbers do not follow."""
    numbered = enumerate(items)
    groups = groupby(numbered, key=lambda at: (at[1][1], _offset(at[1][0], at[0])))
    return [[item for _, item in group] for _, group in groups]


def _offset(key: str, place: int) -> int | str:
    return int(key) - place if key.isascii() and key.isdigit() else key


def _comprehension(run: Sequence[Item]) -> str | None:
    numbers = number_range([key for key, _ in run])
    if len(run) < SHORTEST or numbers is None:
        return None
    return f"str(i): {run[0][1]} for i in {numbers}"


def _part(run: Sequence[Item]) -> str:
    if one := _comprehension(run):
        return f"**{{{one}}}"
    return ", ".join(f"{quoted(key)}: {maker}" for key, maker in run)


ON_CPU = ', device="cpu"'
"""Behind the arguments of what no model has: it is made even where all else is on meta."""


def _parameter_text(graph: IRGraph, value: IRValue) -> str:
    """``nn.Parameter(torch.empty(768, 2304))``."""
    frozen = "" if takes_gradient(graph, value) else ", requires_grad=False"
    return f"nn.Parameter({empty(value.shape, torch_dtype(value.dtype))}{frozen})"


def _buffer_text(graph: IRGraph, value: IRValue, name: str) -> str:
    """``self.register_buffer("mask", torch.ones(4, 4), persistent=False)``.

    Raises CodegenError for a constant whose contents are too many, or not known.
    """
    saved = "" if is_saved(value) else ", persistent=False"
    return f"self.register_buffer({quoted(name)}, {_contents(graph, value)}{saved})"


def _contents(graph: IRGraph, value: IRValue) -> str:
    found = _told(graph, value, "" if _is_models(value) else ON_CPU)
    if found is None and not _is_models(value):
        raise CodegenError(
            f"{value.name!r}, {value.dtype}[{', '.join(map(str, value.shape))}], is no buffer of "
            "the model, and its contents are not known or too many to be written into a file; "
            "register it as a buffer of the model (register_buffer)"
        )
    return found or empty(value.shape, torch_dtype(value.dtype))


def _told(graph: IRGraph, value: IRValue, options: str = "") -> str | None:
    """What a buffer holds; of what a state has, only where that is said in a line."""
    tensor = graph.tensors.get(value.id)
    if tensor is None and value.init == "zeros":
        tensor = torch.zeros(value.shape, dtype=torch_dtype(value.dtype))
    if tensor is None:
        return None
    found = contents(tensor, options)
    return encoded(tensor, options) if found is None and not is_saved(value) else found


def _is_models(value: IRValue) -> bool:
    """Whether a model has it, among its parameters and buffers."""
    return value.role in ("param", "buffer")


def is_saved(value: IRValue) -> bool:
    """Whether a state dict holds the buffer."""
    return value.persistent and _is_models(value)


def is_told(graph: IRGraph, value: IRValue) -> bool:
    """Whether a fresh module has the right contents, or its state has them."""
    if value.role == "param" or is_saved(value):
        return True
    return _told(graph, value) is not None


def untold(program: StageProgram) -> list[str]:
    """The names of buffers that only a model can fill."""
    graphs = [stage.graph for partition in program.partitions for stage in partition]
    pairs = ((graph, value) for graph in graphs for value in graph.stored())
    return [value.name for graph, value in pairs if not is_told(graph, value)]


_OF_DICTIONARIES = frozenset(dir(nn.ModuleDict)) - frozenset(dir(nn.Module))


@dataclass(frozen=True, slots=True)
class Made:
    """A module as its parent makes and calls it.

    constructor, kind
        The expression that makes it, and its class.
    arguments, results
        What its call reads and gives, value ids; of a module that is called.
    takes, gives
        Its own names for these.
    """

    constructor: str
    kind: str
    arguments: tuple[int, ...] = ()
    results: tuple[int, ...] = ()
    takes: tuple[str, ...] = ()
    gives: tuple[str, ...] = ()


CONTAINERS = ("nn.Sequential", DICTIONARY, "nn.ParameterDict")
"""What holds modules or parameters and has no constructor of its own to say more about them."""


@dataclass(eq=False)
class Construction:
    """The modules of one stage; ``write`` makes a class of a module that needs one."""

    stage: Stage
    calls: Calls
    write: Callable[[Module], Made]
    _made: dict[Module, Made | None] = field(default_factory=dict)
    _live: dict[Module, bool] = field(default_factory=dict)

    def made(self, module: Module) -> Made:
        """What makes a module that holds or does something."""
        if module not in self._made:
            self._made[module] = self._make(module)
        found = self._made[module]
        assert found is not None, module.path
        return found

    def is_live(self, module: Module) -> bool:
        """Whether a module holds or does anything in this stage."""
        if module not in self._live:
            own = bool(module.tensors) or module in self.calls.by_module
            self._live[module] = own or any(map(self.is_live, module.children.values()))
        return self._live[module]

    def children(self, module: Module) -> list[Module]:
        """The modules in a module that hold or do something."""
        return [child for child in module.children.values() if self.is_live(child)]

    def _make(self, module: Module) -> Made:
        call = self.calls.by_module.get(module)
        if call is not None and call.layer is not None:
            layer = call.layer
            kind = layer.constructor.partition("(")[0]
            return Made(layer.constructor, kind, layer.arguments, layer.results)
        if call is None and not is_plain_holder(module):
            children = self.children(module)
            if not module.tensors:
                items = [(child.name, self.made(child).constructor) for child in children]
                return Made(module_dict(items), DICTIONARY)
            roles = {self.stage.graph.values[v].role for v in module.tensors.values()}
            if not children and roles == {"param"}:
                parameters = [(name, self._parameter(v)) for name, v in module.tensors.items()]
                return Made(parameter_dict(parameters), "nn.ParameterDict")
        return self.write(module)

    # --- declarations -----------------------------------------------------------------------

    def base(self, module: Module) -> str:
        """What the class of a module is derived from.

        That is a dictionary for children under numbers, if no name is one of its own methods'.
        """
        children = [child.name for child in self.children(module)]
        clash = not _OF_DICTIONARIES.isdisjoint((*children, *module.tensors))
        return MODULE if clash or all(map(is_plain, children)) else DICTIONARY

    def statements(self, module: Module) -> Iterator[str]:
        """The constructor of a module's class: tensors, children, ties."""
        for name, value_id in module.tensors.items():
            yield from self._declaration(module, name, self.stage.graph.values[value_id])
        for child in self.children(module):
            made = self.made(child).constructor
            if is_plain(child.name):
                yield f"self.{child.name} = {made}"
            elif self.base(module) == DICTIONARY:
                yield f"self[{quoted(child.name)}] = {made}"
            else:
                yield f"self.add_module({quoted(child.name)}, {made})"
        yield from self._ties(module)

    def fields(self, module: Module) -> Iterator[str]:
        """Annotations for the tensors of a module whose types its constructor does not tell."""
        for name, value_id in module.tensors.items():
            if self.stage.graph.values[value_id].role != "param" and is_plain(name):
                yield f"{name}: Tensor{'  # noqa: E741' if name in AMBIGUOUS else ''}"

    def _declaration(self, module: Module, name: str, value: IRValue) -> Iterator[str]:
        if value.role == "param" and not is_plain(name):
            yield f"self.register_parameter({quoted(name)}, {self._parameter(value.id)})"
        elif value.role == "param":
            leading = self.calls.tree.homes[value.id][0]
            tied = (leading.module, leading.name) != (module, name)
            yield f"self.{name}{': Tensor' if tied else ''} = {self._parameter(value.id)}"
        else:
            if not is_told(self.stage.graph, value):
                yield "# What it holds comes from the model, see create_pipeline_configuration."
            yield _buffer_text(self.stage.graph, value, name)

    def _parameter(self, value_id: int) -> str:
        return _parameter_text(self.stage.graph, self.stage.graph.values[value_id])

    def _ties(self, module: Module) -> Iterator[str]:
        """Tensors of several names of which this is the innermost class around all."""
        for homes in self.calls.tree.homes.values():
            leading, *others = homes
            for home in others:
                around = set(leading.module.upwards())
                common = next(m for m in home.module.upwards() if m in around)
                if self._constructs(module, common):
                    yield self._tie(module, home, leading)

    def _tie(self, module: Module, home: Home, leading: Home) -> str:
        """The statement that puts a tensor where it stands under another name."""
        holder, tensor = self.module(module, home.module), self.tensor(module, leading)
        if is_plain(home.name):
            return f"{holder}.{home.name} = {tensor}"
        value, name = self.stage.graph.values[home.module.tensors[home.name]], quoted(home.name)
        if value.role == "param":
            return f"{holder}.register_parameter({name}, {tensor})"
        saved = "" if is_saved(value) else ", persistent=False"
        return f"{holder}.register_buffer({name}, {tensor}{saved})"

    def _constructs(self, module: Module, other: Module) -> bool:
        """Whether the constructor of ``module`` is that around all that ``other`` holds."""
        between = module.down_to(other)
        inside = other is module or bool(between)
        return inside and all(self.made(inner).kind in CONTAINERS for inner in between)

    # --- reaching -----------------------------------------------------------------------------

    def module(self, start: Module, module: Module) -> str:
        """How a method of ``start`` reaches a module inside it, to call it."""
        return self._path(start, module)[0]

    def tensor(self, start: Module, home: Home) -> str:
        """How a method of ``start`` reads a tensor inside it, of a type that a checker knows."""
        text, is_known = self._path(start, home.module)
        has_fields = home.module is start or self.made(home.module).kind != "nn.ParameterDict"
        if is_known and not has_fields:
            return f"{text}[{quoted(home.name)}]"
        if is_known and is_plain(home.name):
            return f"{text}.{home.name}"
        value = self.stage.graph.values[home.module.tensors[home.name]]
        kind = "parameter" if value.role == "param" else "buffer"
        return f"self.get_{kind}({quoted(_below(start, home.path))})"

    def _path(self, start: Module, module: Module) -> tuple[str, bool]:
        """The expression, and whether a type checker knows its class."""
        text, is_known = "self", True
        for inner in start.down_to(module):
            if not is_known:
                return f"self.get_submodule({quoted(_below(start, module.path))})", False
            kind = None if inner.parent is start else self.made(inner.parent or start).kind
            if kind != "nn.Sequential" and is_plain(inner.name):
                text = f"{text}.{inner.name}"
            elif kind == "nn.Sequential" or self.base(inner.parent or start) == MODULE:
                text, is_known = f"{text}.get_submodule({quoted(inner.name)})", False
            else:
                text, is_known = f"{text}[{quoted(inner.name)}]", False
        return text, is_known


def _below(start: Module, path: str) -> str:
    """A path as ``start`` says it."""
    return path.removeprefix(f"{start.path}.") if start.path else path


def is_plain_holder(module: Module) -> bool:
    """Whether what a module holds can stand in a class: names that may stand behind a dot."""
    names = [*module.tensors, *module.children]
    return any(map(is_plain, names)) or bool(module.tensors and module.children)
