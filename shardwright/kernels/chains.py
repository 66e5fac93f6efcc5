"""Chains: a program of elementwise operators over one element, as text and as a value.

    mul x0 x1; add %0 0.5; tanh %1 -> %2 %0

Instruction i defines ``%i``; its operands are inputs (``xN``), earlier results (``%N``) and
literals (a float as Python writes it, with ``inf``, ``-inf`` and ``nan``). After the arrow stand
the outputs. In a `Chain` that was parsed or checked an operand is defined before it is used, every
operator has its number of operands, and there is an output; ``parse_chain(str(chain)) == chain``.

Inputs broadcast together. All is computed in f64 where an input or an output is f64, else in f32;
a load converts from the operand's dtype and a store to it. Truth is 1.0 and 0.0; what is not 0 is
true. NaN passes through ``max`` and ``min``, ``round`` goes to the even one of two.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from shardwright.errors import ExecError


@dataclass(frozen=True, slots=True)
class ChainInput:
    """Input number ``index``: ``x0``."""

    index: int

    def __str__(self) -> str:
        return f"x{self.index}"


@dataclass(frozen=True, slots=True)
class ChainResult:
    """What instruction ``index`` computed: ``%0``."""

    index: int

    def __str__(self) -> str:
        return f"%{self.index}"


ChainOperand = ChainInput | ChainResult | float
"""What an instruction reads."""


@dataclass(frozen=True, slots=True)
class ChainInstruction:
    """One operator of `OPERATORS` on its operands."""

    op: str
    operands: tuple[ChainOperand, ...]

    def __str__(self) -> str:
        return " ".join((self.op, *map(_text, self.operands)))


@dataclass(frozen=True, slots=True)
class Chain:
    """A program; ``outputs`` are numbers of instructions."""

    instructions: tuple[ChainInstruction, ...]
    outputs: tuple[int, ...]

    def __str__(self) -> str:
        outputs = " ".join(f"%{index}" for index in self.outputs)
        return f"{'; '.join(map(str, self.instructions))} -> {outputs}"

    @property
    def inputs(self) -> int:
        """How many inputs it reads: one more than the highest number of one."""
        loads = (
            o.index for i in self.instructions for o in i.operands if isinstance(o, ChainInput)
        )
        return max(loads, default=-1) + 1


def _text(operand: ChainOperand) -> str:
    return repr(operand) if isinstance(operand, float) else str(operand)


# --- the operators ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ChainOperator:
    """How many operands, and what torch computes of tensors of the dtype of computation."""

    arity: int
    function: Callable[..., torch.Tensor]


def _gradient(function: Callable[..., torch.Tensor], **options: str) -> Callable[..., torch.Tensor]:
    """A backward operator of torch, some of which take tensors of one shape only."""

    def run(dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        same = (tensor.contiguous() for tensor in torch.broadcast_tensors(dy, x))
        return function(*same, **options)

    return run


_aten = torch.ops.aten
_UNARY: Mapping[str, Callable[..., torch.Tensor]] = {
    "neg": torch.neg,
    "abs": torch.abs,
    "sign": torch.sign,
    "exp": torch.exp,
    "expm1": torch.expm1,
    "log": torch.log,
    "log1p": torch.log1p,
    "log2": torch.log2,
    "sqrt": torch.sqrt,
    "rsqrt": torch.rsqrt,
    "reciprocal": torch.reciprocal,
    "square": torch.square,
    "sin": torch.sin,
    "cos": torch.cos,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "erf": torch.erf,
    "relu": torch.relu,
    "silu": _aten.silu.default,
    "gelu": lambda x: _aten.gelu.default(x),
    "gelu_tanh": lambda x: _aten.gelu.default(x, approximate="tanh"),
    "floor": torch.floor,
    "ceil": torch.ceil,
    "round": torch.round,
    "trunc": torch.trunc,
    "not": lambda x: x == 0,
    "isnan": torch.isnan,
}
_BINARY: Mapping[str, Callable[..., torch.Tensor]] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": torch.div,
    "pow": torch.pow,
    "max": torch.maximum,
    "min": torch.minimum,
    "gt": torch.gt,
    "ge": torch.ge,
    "lt": torch.lt,
    "le": torch.le,
    "eq": torch.eq,
    "ne": torch.ne,
    "and": lambda a, b: (a != 0) & (b != 0),
    "or": lambda a, b: (a != 0) | (b != 0),
    "tanh_bwd": _gradient(_aten.tanh_backward.default),
    "sigmoid_bwd": _gradient(_aten.sigmoid_backward.default),
    "relu_bwd": lambda dy, x: torch.where(x <= 0, 0.0, dy),
    "silu_bwd": _gradient(_aten.silu_backward.default),
    "gelu_bwd": _gradient(_aten.gelu_backward.default),
    "gelu_tanh_bwd": _gradient(_aten.gelu_backward.default, approximate="tanh"),
}

OPERATORS: Mapping[str, ChainOperator] = {
    **{name: ChainOperator(1, function) for name, function in _UNARY.items()},
    **{name: ChainOperator(2, function) for name, function in _BINARY.items()},
    "where": ChainOperator(3, lambda c, a, b: torch.where(c != 0, a, b)),
}
"""Every operator by name; those in ``_bwd`` take the gradient first, then what torch's take."""


_TAKE_NUMBERS = frozenset({"add", "sub", "mul", "div", "pow", "gt", "ge", "lt", "le", "eq", "ne"})
"""Operators whose functions take a number as the second operand: no tensor is made of it."""


# --- text ------------------------------------------------------------------------------------

_REFERENCE = re.compile(r"(x|%)(0|[1-9][0-9]*)")


@lru_cache(maxsize=1024)
def parse_chain(program: str) -> Chain:
    """The chain that a text says. Raises ExecError, which names the instruction."""
    body, arrow, ends = program.rpartition("->")
    if not arrow:
        raise ExecError(f"chain {program!r} has no outputs; they stand at the end, as '-> %0'")
    instructions = []
    for index, part in enumerate(body.split(";")):
        op, *operands = part.split() or [""]
        parsed = tuple(_operand(token, f"instruction %{index}", program) for token in operands)
        instructions.append(ChainInstruction(op, parsed))
    outputs = [_operand(token, "the outputs", program) for token in ends.split()]
    if not all(isinstance(output, ChainResult) for output in outputs):
        raise ExecError(f"chain {program!r}: an output is a result, as %0")
    chain = Chain(
        tuple(instructions), tuple(o.index for o in outputs if isinstance(o, ChainResult))
    )
    check_chain(chain)
    return chain


def _operand(token: str, where: str, program: str) -> ChainOperand:
    if found := _REFERENCE.fullmatch(token):
        index = int(found[2])
        return ChainInput(index) if found[1] == "x" else ChainResult(index)
    try:
        value = float(token)
    except ValueError:
        raise ExecError(
            f"chain {program!r}, {where}: {token!r} is none of xN, %N and a number"
        ) from None
    return math.nan if math.isnan(value) else value  # one object, so that equal chains are equal


def check_chain(chain: Chain) -> None:
    """Raise ExecError at the first rule that the chain breaks."""
    for index, instruction in enumerate(chain.instructions):
        where = f"chain '{chain}', instruction %{index}"
        operator = OPERATORS.get(instruction.op)
        if operator is None:
            raise ExecError(
                f"{where}: there is no operator {instruction.op!r}; there are "
                f"{', '.join(sorted(OPERATORS))}"
            )
        if len(instruction.operands) != operator.arity:
            raise ExecError(
                f"{where}: {instruction.op} takes {operator.arity} operands, not "
                f"{len(instruction.operands)}"
            )
        for operand in instruction.operands:
            if isinstance(operand, ChainResult) and operand.index >= index:
                raise ExecError(f"{where} reads {operand} before it is computed")
    if not chain.outputs:
        raise ExecError(f"chain '{chain}' has no outputs")
    if missing := [index for index in chain.outputs if index >= len(chain.instructions)]:
        raise ExecError(f"chain '{chain}' gives %{missing[0]}, which no instruction computes")


# --- what it computes ------------------------------------------------------------------------


def compute_dtype(dtypes: Sequence[torch.dtype]) -> torch.dtype:
    """In what a call computes whose inputs and outputs have these dtypes."""
    return torch.float64 if torch.float64 in dtypes else torch.float32


def evaluate(
    chain: Chain, inputs: Sequence[torch.Tensor], dtypes: Sequence[torch.dtype]
) -> list[torch.Tensor]:
    """The outputs on these inputs, one operator of torch an instruction, stored as ``dtypes``.

    They have the shape to which the inputs broadcast; their strides are what torch makes of it.
    Raises ExecError where inputs or dtypes are not as many as the chain's.
    """
    if chain.inputs > len(inputs) or len(dtypes) != len(chain.outputs):
        raise ExecError(
            f"chain '{chain}' on {len(inputs)} inputs with {len(dtypes)} dtypes; it reads "
            f"{chain.inputs} and gives {len(chain.outputs)}"
        )
    dtype = compute_dtype([*(tensor.dtype for tensor in inputs), *dtypes])
    loaded = [tensor.to(dtype) for tensor in inputs]
    device = inputs[0].device if inputs else torch.device("cpu")
    results: list[torch.Tensor] = []

    def value(operand: ChainOperand) -> torch.Tensor:
        if isinstance(operand, ChainInput):
            return loaded[operand.index]
        if isinstance(operand, ChainResult):
            return results[operand.index]
        return torch.tensor(operand, dtype=torch.float64, device=device).to(dtype)

    for instruction in chain.instructions:
        first, *others = instruction.operands
        plain = instruction.op in _TAKE_NUMBERS
        arguments: list[torch.Tensor | float] = [
            item if plain and isinstance(item, float) else value(item) for item in others
        ]
        results.append(OPERATORS[instruction.op].function(value(first), *arguments).to(dtype))
    shape = torch.broadcast_shapes(*(tensor.shape for tensor in inputs))
    return [
        results[index].to(store).expand(shape)
        for index, store in zip(chain.outputs, dtypes, strict=True)
    ]
