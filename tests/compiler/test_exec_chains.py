"""The language of chains: what round-trips, what is refused, what it computes."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwright.errors import ExecError
from shardwright.kernels.chains import (
    OPERATORS,
    Chain,
    ChainInput,
    ChainInstruction,
    ChainOperand,
    ChainResult,
    check_chain,
    evaluate,
    parse_chain,
)


@st.composite
def chains(draw: st.DrawFn) -> Chain:
    instructions: list[ChainInstruction] = []
    for index in range(draw(st.integers(1, 8))):
        name = draw(st.sampled_from(sorted(OPERATORS)))
        operand: st.SearchStrategy[ChainOperand] = st.one_of(
            st.integers(0, 3).map(ChainInput),
            st.floats(allow_nan=False),
            st.just(math.nan),
            *([st.integers(0, index - 1).map(ChainResult)] if index else []),
        )
        operands = [draw(operand) for _ in range(OPERATORS[name].arity)]
        instructions.append(ChainInstruction(name, tuple(operands)))
    outputs = draw(st.lists(st.integers(0, len(instructions) - 1), min_size=1, max_size=3))
    return Chain(tuple(instructions), tuple(outputs))


@given(chains())
def test_a_chain_is_its_text(chain: Chain) -> None:
    check_chain(chain)
    assert parse_chain(str(chain)) == chain
    assert str(parse_chain(str(chain))) == str(chain)


def test_the_text_of_the_manual() -> None:
    chain = parse_chain("mul x0 x1; add %0 0.5; tanh %1 -> %2 %0")
    assert chain.instructions[1] == ChainInstruction("add", (ChainResult(0), 0.5))
    assert chain.outputs == (2, 0)
    assert chain.inputs == 2


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("add x0 x1", "no outputs; they stand at the end"),
        ("add x0 x1 -> ", "has no outputs"),
        ("add x0 x1 -> x0", "an output is a result"),
        ("add x0 x1 -> %1", "gives %1, which no instruction computes"),
        ("frob x0 -> %0", "no operator 'frob'"),
        ("add x0 -> %0", "add takes 2 operands, not 1"),
        ("add x0 y1 -> %0", "'y1' is none of xN, %N and a number"),
        ("add x0 %0 -> %0", "reads %0 before it is computed"),
        ("add x0 x01 -> %0", "'x01' is none"),
        (" -> %0", "no operator ''"),
    ],
)
def test_what_is_no_chain_is_refused(program: str, message: str) -> None:
    with pytest.raises(ExecError, match=message):
        parse_chain(program)


def test_evaluation_is_what_torch_computes() -> None:
    x, y = torch.randn(3, 4), torch.randn(4)
    chain = parse_chain("mul x0 x1; add %0 0.5; tanh %1; gt %2 %0 -> %2 %0 %3")
    tanh, product, greater = evaluate(chain, [x, y], [torch.float32, torch.float32, torch.bool])
    assert torch.equal(product, x * y)
    assert torch.equal(tanh, torch.tanh(x * y + 0.5))
    assert torch.equal(greater, torch.tanh(x * y + 0.5) > x * y)


def test_every_operator_runs_and_broadcasts() -> None:
    inputs = [torch.rand(2, 1) + 0.5, torch.rand(3), torch.rand(2, 3)]
    for name, operator in OPERATORS.items():
        operands = " ".join(f"x{i}" for i in range(operator.arity))
        (made,) = evaluate(parse_chain(f"{name} {operands} -> %0"), inputs, [torch.float32])
        assert made.shape == (2, 3), name
        assert not made.isnan().any(), name


def test_what_is_computed_in_f64_where_an_operand_is_f64() -> None:
    chain = parse_chain("div x0 3.0; mul %0 3.0; sub %1 x0 -> %2")
    x = torch.tensor([0.7], dtype=torch.float64)
    assert evaluate(chain, [x], [torch.float64])[0] == x / 3 * 3 - x
    wide = evaluate(parse_chain("div x0 3.0 -> %0"), [x.float()], [torch.float64])[0]
    assert wide == x.float().double() / 3


def test_truth_and_nan() -> None:
    nan = torch.tensor([math.nan, 1.0, 0.0, -2.0])
    for program, expected in {
        "not x0 -> %0": [0.0, 0.0, 1.0, 0.0],
        "and x0 1.0 -> %0": [1.0, 1.0, 0.0, 1.0],
        "isnan x0 -> %0": [1.0, 0.0, 0.0, 0.0],
        "gt x0 0.0 -> %0": [0.0, 1.0, 0.0, 0.0],
        "where x0 2.0 3.0 -> %0": [2.0, 2.0, 3.0, 2.0],
    }.items():
        made = evaluate(parse_chain(program), [nan], [torch.float32])[0]
        assert made.tolist() == expected, program
    assert evaluate(parse_chain("max x0 0.0 -> %0"), [nan], [torch.float32])[0][0].isnan()


def test_a_number_beyond_the_dtype_is_infinite() -> None:
    for op in ("add", "max"):
        (made,) = evaluate(parse_chain(f"{op} x0 1e+300 -> %0"), [torch.ones(2)], [torch.float32])
        assert made.tolist() == [math.inf, math.inf], op


def test_a_call_with_the_wrong_number_of_operands_is_refused() -> None:
    with pytest.raises(ExecError, match="reads 2 and gives 1"):
        evaluate(parse_chain("add x0 x1 -> %0"), [torch.ones(2)], [torch.float32])
