"""Native chains against the interpreter over torch."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.errors import ExecError
from shardwright.kernels.chains import (
    OPERATORS,
    Chain,
    ChainInput,
    ChainInstruction,
    ChainOperand,
    ChainResult,
    evaluate,
    parse_chain,
)
from tests.kernels.native.calls import native_call
from tests.kernels.native.tensors import FLOATS, LOW, broadcast, close, shapes, strided

INPUTS = [*FLOATS, torch.float32, *LOW, torch.bool, torch.int64, torch.int32, torch.uint8]
OUTPUTS = [*FLOATS, torch.float32, *LOW, torch.bool]
TOLERANCE = {torch.float16: 1e-3, torch.bfloat16: 1e-2, torch.float32: 4e-6, torch.float64: 1e-12}
# What does not make of two near numbers two that are far apart, and does not overflow.
TAME = [name for name in OPERATORS if name.endswith("_bwd")]
TAME += [
    "add",
    "sub",
    "mul",
    "neg",
    "abs",
    "relu",
    "tanh",
    "sigmoid",
    "silu",
    "gelu",
    "gelu_tanh",
    "max",
    "min",
    "sin",
    "cos",
    "erf",
]
SHARP = [
    "gt",
    "le",
    "eq",
    "ne",
    "where",
    "and",
    "or",
    "not",
    "isnan",
    "sign",
    "round",
    "floor",
    "ceil",
    "trunc",
]


def check(
    program: str,
    inputs: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor],
    *,
    threads: int = 1,
    tolerance: float | None = None,
    least: float = 0,
) -> None:
    """Runs natively, and compares with the interpreter."""
    dtypes = [output.dtype for output in outputs]
    expected = evaluate(parse_chain(program), [x.clone() for x in inputs], dtypes)
    native_call("chain", {"program": program}, inputs, outputs, threads=threads)
    for found, one in zip(outputs, expected, strict=True):
        limit = TOLERANCE.get(found.dtype, 0) if tolerance is None else tolerance
        close(found, one.expand(found.shape), limit, least)


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_every_operator(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    edges = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, 1.0, -1.0, 0.5, 2.5, -2.5])
    values = torch.cat([edges, torch.randn(27)]).to(dtype)
    arity = OPERATORS[name].arity
    if name in ("exp", "expm1", "pow", "gelu"):
        values = values.clamp(-5, 5)  # torch's gelu gives NaN of inf
    grid = [x.flatten() for x in torch.meshgrid([values] * arity, indexing="ij")]
    program = f"{name} {' '.join(f'x{k}' for k in range(arity))} -> %0"
    check(program, grid, [torch.empty_like(grid[0])])


@st.composite
def programs(draw: st.DrawFn, inputs: int, names: Sequence[str]) -> Chain:
    instructions: list[ChainInstruction] = []
    for index in range(draw(st.integers(1, 12))):
        name = draw(st.sampled_from(names))

        def operand(index: int = index) -> ChainOperand:
            where = draw(st.integers(0, 7))
            if where == 0:
                return draw(st.sampled_from([0.0, 0.5, -1.25, 3.0]))
            return (
                ChainResult(draw(st.integers(0, index - 1)))
                if where < 5 and index
                else ChainInput(draw(st.integers(0, inputs - 1)))
            )

        operands = tuple(operand() for _ in range(OPERATORS[name].arity))
        instructions.append(ChainInstruction(name, operands))
    outputs = draw(st.lists(st.integers(0, len(instructions) - 1), min_size=1, max_size=3))
    return Chain(tuple(instructions), (*outputs, len(instructions) - 1))


@settings(deadline=None, max_examples=100)
@given(st.data())
def test_random_chains(data: st.DataObject) -> None:
    torch.manual_seed(data.draw(st.integers(0, 99)))
    shape = data.draw(shapes())
    count = data.draw(st.integers(1, 4))
    dtypes = [data.draw(st.sampled_from(INPUTS)) for _ in range(count)]
    inputs = [data.draw(st.composite(broadcast)(shape, dtype)) for dtype in dtypes]
    inputs[0] = data.draw(st.composite(strided)(shape, dtypes[0]))
    # In f64, in which a comparison of two results comes out alike.
    chain = data.draw(programs(count, [*TAME, *SHARP]))
    stores = [torch.float64, *(data.draw(st.sampled_from(OUTPUTS)) for _ in chain.outputs[1:])]
    outputs = [data.draw(st.composite(strided)(shape, dtype)) for dtype in stores]
    dtypes_out = [output.dtype for output in outputs]
    expected = evaluate(chain, inputs, dtypes_out)
    sizes = [one.double().abs().max().item() if one.numel() else 0.0 for one in expected]
    if not all(size < 1e4 for size in sizes):
        return
    native_call("chain", {"program": str(chain)}, inputs, outputs)
    for found, one in zip(outputs, expected, strict=True):
        if found.dtype == torch.bool:
            continue  # a result that is 0 but for rounding may be either
        close(found, one.expand(shape), TOLERANCE[found.dtype], least=1e-3)


@settings(deadline=None, max_examples=100)
@given(st.data())
def test_random_chains_of_floats(data: st.DataObject) -> None:
    """Two ways of f32 differ by rounding, the more the longer the chain: so few at a time."""
    torch.manual_seed(data.draw(st.integers(0, 99)))
    shape = data.draw(shapes())
    inputs = [data.draw(st.composite(strided)(shape, torch.float32))]
    inputs += [data.draw(st.composite(broadcast)(shape, torch.float32)) for _ in range(2)]
    first, second = data.draw(st.lists(st.sampled_from(TAME), min_size=2, max_size=2))

    def line(name: str, *operands: str) -> str:
        return f"{name} {' '.join(operands[: OPERATORS[name].arity])}"

    program = f"{line(first, 'x0', 'x1')}; {line(second, '%0', 'x2')} -> %1 %0"
    outputs = [data.draw(st.composite(strided)(shape, torch.float32)) for _ in range(2)]
    # torch's gelu_tanh takes the difference of two numbers near 1.
    check(program, inputs, outputs, tolerance=2e-5, least=1)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_outputs_in_the_memory_of_inputs(order: tuple[int, int]) -> None:
    torch.manual_seed(0)
    inputs = [torch.randn(5, 1300), torch.randn(5, 1300)]
    program = "mul x0 x1; tanh %0; add %1 x0; sub %2 x1 -> %1 %3"
    expected = evaluate(parse_chain(program), inputs, [torch.float32] * 2)
    outputs = [inputs[k] for k in order]
    native_call("chain", {"program": program}, inputs, outputs)
    for found, one in zip(outputs, expected, strict=True):
        close(found, one, 1e-6)


BROADCASTS: dict[str, list[tuple[int, ...]]] = {
    "bias": [(300, 200), (200,)],
    "long bias": [(7, 3000), (3000,)],
    "column": [(300, 200), (300, 1)],
    "long column": [(7, 3000), (7, 1)],
    "short column": [(4000, 3), (4000, 1)],
    "number": [(60, 70), ()],
    "outer": [(40, 1), (1, 50)],
    "middle": [(9, 70, 11), (9, 1, 11)],
    "batch": [(6, 32, 40), (32, 40)],
}


@pytest.mark.parametrize("case", BROADCASTS)
@pytest.mark.parametrize("threads", [1, 2])
def test_broadcasts(case: str, threads: int) -> None:
    torch.manual_seed(0)
    a, b = (torch.randn(shape) for shape in BROADCASTS[case])
    shape = torch.broadcast_shapes(a.shape, b.shape)
    outputs = [torch.empty(shape), torch.empty(shape, dtype=torch.float64)]
    check("add x0 x1; mul %0 x1 -> %1", [a, b], outputs[:1], threads=threads)
    check("sub x0 x1; exp %0 -> %1 %0", [a, b], outputs, threads=threads, tolerance=1e-6)


def test_threads_change_nothing() -> None:
    torch.manual_seed(0)
    x, bias, y = torch.randn(400, 700), torch.randn(700), torch.randn(700, 400).t()
    program = {"program": "add x0 x1; gelu %0; mul %1 x2; add %2 0.25 -> %3 %1"}
    found = []
    for threads in (1, 2, 3):
        outputs = [torch.empty(400, 700) for _ in range(2)]
        native_call("chain", program, [x, bias, y], outputs, threads=threads)
        found.append(outputs)
    for others in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], others, strict=True))


def test_a_long_chain_of_many_live_results() -> None:
    torch.manual_seed(0)
    parts = [f"mul x0 {k / 7}" for k in range(40)]
    parts += ["add %0 %1"] + [f"add %{39 + k} %{k + 1}" for k in range(1, 39)]
    check(f"{'; '.join(parts)} -> %{len(parts) - 1}", [torch.randn(2311)], [torch.empty(2311)])


def test_literals() -> None:
    x = torch.randn(5)
    program = "max x0 -inf; min %0 inf; add %1 1e-05; mul %2 nan; isnan %3 -> %1 %2 %4"
    check(program, [x], [torch.empty(5), torch.empty(5), torch.empty(5, dtype=torch.bool)])


@pytest.mark.parametrize("power", [2.0, 3.0, 0.5, -0.5, -1.0, 2.5, 0.0])
def test_powers(power: float) -> None:
    check(f"pow x0 {power!r} -> %0", [torch.rand(100) + 0.1], [torch.empty(100)], tolerance=1e-6)


@pytest.mark.parametrize(
    ("program", "outputs", "reason"),
    [
        ("frobnicate x0 -> %0", 1, "frobnicate"),
        ("add x0 -> %0", 1, "number of operands"),
        ("pow x0 -> %0", 1, "number of operands"),
        ("add %0 -> %0", 1, "number of operands"),
        ("mul x0; add %0 x0 -> %1", 1, "number of operands"),
        ("mul; add %0 x0 -> %1", 1, "number of operands"),
        ("add -> %0", 1, "number of operands"),
        ("add x0 x1 -> %0", 1, "more inputs"),
        ("add x9 x0 -> %0", 1, "more inputs"),
        ("neg x-1 -> %0", 1, "x-1"),
        ("neg %-1 -> %0", 1, "%-1"),
        ("add %3 x0 -> %0", 1, "later"),
        ("add x0 1.0x -> %0", 1, "1.0x"),
        ("add x0 %0 -> %0", 1, "later"),
        ("neg x0 -> %1", 1, "no instruction"),
        ("neg x0", 1, "->"),
        ("neg x0 -> x0", 1, "output"),
        ("neg x0 -> %0", 2, "outputs"),
    ],
)
def test_what_is_refused(program: str, outputs: int, reason: str) -> None:
    with pytest.raises(ExecError, match=reason):
        native_call("chain", {"program": program}, [torch.ones(3)], [torch.ones(3)] * outputs)


def test_shapes_and_dtypes_that_are_refused() -> None:
    with pytest.raises(ExecError, match="broadcast"):
        native_call("chain", {"program": "neg x0 -> %0"}, [torch.ones(3)], [torch.ones(4)])
    numbers = torch.ones(3, dtype=torch.complex64)
    with pytest.raises(ExecError, match="dtype"):
        native_call("chain", {"program": "neg x0 -> %0"}, [numbers], [torch.ones(3)])
