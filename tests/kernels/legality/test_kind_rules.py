"""Rules of kinds: what they let pass, kernels do without moving what they write to."""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import pytest
import torch

from shardwright.errors import ExecError
from shardwright.ir.tensor_meta import DTYPES, dtype_name
from shardwright.kernels.files import check_calls
from shardwright.kernels.lowered import (
    BY_NAME,
    KINDS,
    LoweredGraph,
    LoweredOp,
    ValueSpec,
    bind_torch,
)
from shardwright.kernels.row import ABSENT
from shardwright.kernels.torch_kernels import present
from tests.kernels.kind_calls import CALLS, Operands


def floats(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    return [torch.zeros(shape) for shape in shapes]


def numbers(*shape: int) -> list[torch.Tensor]:
    return [torch.zeros(shape, dtype=torch.int64)]


each_kind = pytest.mark.parametrize("kind", CALLS)


def graph_of(kind: str, attrs: Mapping[str, Any], ins: Operands, outs: Operands) -> LoweredGraph:
    """One call as a graph."""
    row = BY_NAME[kind]
    tensors = dict(enumerate((*ins, *outs)))
    values = {
        k: ValueSpec(k, f"v{k}", tuple(t.shape), dtype_name(t.dtype), "tmp", t.stride())
        for k, t in tensors.items()
        if t is not None
    }
    vids = [k if k in values else ABSENT for k in tensors]
    n = len(ins)
    schema, blob = row.pack(attrs)
    op = LoweredOp(row.id, schema, blob, tuple(vids[:n]), tuple(vids[n:]), "call 0")
    return LoweredGraph("one", values, (op,), tuple(v for v in vids[:n] if v >= 0), ())


def complaint(kind: str, attrs: Mapping[str, Any], ins: Operands, outs: Operands) -> str:
    """What is wrong with a call; empty where nothing is."""
    said = ""
    try:
        check_calls(graph_of(kind, attrs, ins, outs))
    except ExecError as error:
        said = str(error)
    assert not said or said.startswith(f"call 0, {kind}: ")
    return said


def runs(kind: str, attrs: Mapping[str, Any], ins: Operands, outs: Operands) -> None:
    """The torch kernel does the call, and its outputs stay what they are."""
    given = [None if t is None else torch.zeros_like(t) for t in (*ins, *outs)]
    before = [(t.data_ptr(), t.shape, t.stride()) for t in present(given[len(ins) :])]
    bind_torch(kind, attrs, given[: len(ins)], given[len(ins) :])()
    assert before == [(t.data_ptr(), t.shape, t.stride()) for t in present(given[len(ins) :])]


def with_other(operands: Operands, place: int, other: torch.Tensor | None) -> Operands:
    return [other if k == place else tensor for k, tensor in enumerate(operands)]


def others(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Tensors of other shapes and dtypes."""
    shape = list(tensor.shape)
    for dim in range(len(shape)):
        for size in (0, 1, shape[dim] + 1):
            yield tensor.new_zeros([size if d == dim else n for d, n in enumerate(shape)])
        yield tensor.new_zeros(shape[:dim] + shape[dim + 1 :])
    yield tensor.new_zeros([1, *shape])
    yield tensor.new_zeros([*shape, 2])
    for name in DTYPES:
        yield torch.zeros(shape, dtype=DTYPES[name])


def test_every_kind_has_a_rule() -> None:
    assert {kind.name for kind in KINDS if kind.makes is None} == {"view"}
    assert CALLS.keys() == {kind.name for kind in KINDS} - {"view", "generic"}


@each_kind
def test_its_call_is_legal(kind: str) -> None:
    call = CALLS[kind]
    assert complaint(kind, *call) == ""


@each_kind
def test_another_operand_is_refused_or_done(kind: str) -> None:
    """Every operand in turn, with other sizes, dimensions and dtypes."""
    attrs, ins, outs = CALLS[kind]
    operands = [*ins, *outs]
    for place, tensor in enumerate(operands):
        assert tensor is not None
        refused = 0
        for other in others(tensor):
            changed = with_other(operands, place, other)
            given = attrs, changed[: len(ins)], changed[len(ins) :]
            if complaint(kind, *given):
                refused += 1
            else:
                runs(kind, *given)
        assert refused > 1 or kind == "fill", (place, refused)


@each_kind
def test_its_call_of_another_dtype_is_refused_or_done(kind: str) -> None:
    """All operands together: which dtypes go with which is the kernel's affair."""
    attrs, ins, outs = CALLS[kind]
    for dtype in DTYPES.values():
        changed = [
            None if t is None else t.to(dtype) if t.is_floating_point() else t
            for t in (*ins, *outs)
        ]
        given = attrs, changed[: len(ins)], changed[len(ins) :]
        if not complaint(kind, *given):
            with suppress(NotImplementedError):  # of dtypes that torch adds nothing in
                runs(kind, *given)


ODD = (-(2**40), -2, -1, 1, 2, 3, 7, 200, 2**40)
ODD_NUMBERS = (float("nan"), float("inf"), -float("inf"), -1.0, 0.5, 1e300, 3e9)


def odd_values(code: str, value: Any) -> Iterator[Any]:
    if code.endswith("*"):
        yield from ((), (*value, 1))
        for k in range(len(value)):
            yield from ((*value[:k], odd, *value[k + 1 :]) for odd in (0, *ODD))
    elif code == "d":
        yield from ODD_NUMBERS
    elif code == "B":
        yield from (odd for odd in ODD if 0 <= odd < 256)
    elif code in "iq":
        yield from (odd for odd in ODD if code == "q" or abs(odd) < 2**31)


@each_kind
def test_another_attribute_is_refused_or_done(kind: str) -> None:
    call, row = CALLS[kind], BY_NAME[kind]
    attrs = {**row.attrs.defaults, **call.attrs}
    for name, code in row.attrs.codes.items():
        for value in odd_values(code, attrs[name]):
            given = {**attrs, name: value}
            if not complaint(kind, given, call.inputs, call.outputs):
                runs(kind, given, call.inputs, call.outputs)


@each_kind
def test_an_absent_operand_is_refused_or_done(kind: str) -> None:
    call, row = CALLS[kind], BY_NAME[kind]
    operands = [*call.inputs, *call.outputs]
    n = len(call.inputs)
    for place in range(len(operands)):
        changed = with_other(operands, place, None)
        vids = [ABSENT if t is None else k for k, t in enumerate(changed)]
        if row.missing(vids[:n], vids[n:]):
            continue  # refused before any rule is asked
        if not complaint(kind, call.attrs, changed[:n], changed[n:]):
            runs(kind, call.attrs, changed[:n], changed[n:])


@each_kind
def test_an_output_whose_elements_lie_on_one_another_is_refused(kind: str) -> None:
    attrs, ins, outs = CALLS[kind]
    for place, tensor in enumerate(outs):
        assert tensor is not None
        if tensor.numel() > 1:
            folded = torch.as_strided(tensor, tensor.shape, [0] * tensor.dim())
            said = complaint(kind, attrs, ins, with_other(outs, place, folded))
            assert "lie on one another" in said


# --- the generic kind ------------------------------------------------------------------------


def generic(op: str, call: str, ins: Operands, outs: Operands) -> str:
    return complaint("generic", {"op": op, "call": call}, ins, outs)


ONE = '{"args":[{"input":0}],"kwargs":{}}'
TWO = '{"args":[{"input":0},{"input":1}],"kwargs":{}}'
SUM = TWO.replace('"kwargs":{}', '"kwargs":{"alpha":1}')
GENERIC: dict[str, tuple[str, str, Sequence[torch.Tensor], Sequence[torch.Tensor], str]] = {
    "a number where a dtype belongs": (
        "aten.linalg_vector_norm.default",
        '{"args":[{"input":0},2.0,null,false],"kwargs":{"dtype":63}}',
        floats((8,)),
        floats(()),
        "'dtype'.*takes a dtype or null there",
    ),
    "fits": ("aten.sin.default", ONE, floats((2, 3)), floats((2, 3)), ""),
    "another shape": (
        "aten.sin.default",
        ONE,
        floats((2, 3)),
        floats((3, 2)),
        r"output 0 is f32\[3, 2\], but the call makes f32\[2, 3\]",
    ),
    "another dtype": (
        "aten.sin.default",
        ONE,
        floats((2, 3)),
        numbers(2, 3),
        r"output 0 is i64\[2, 3\], but the call makes f32\[2, 3\]",
    ),
    "operands that do not fit": (
        "aten.add.Tensor",
        SUM,
        floats((2,), (3,)),
        floats((2,)),
        r"aten.add.Tensor\(%x0 f32\[2\], %x1 f32\[3\].*does not run",
    ),
    "an operand that is not there": (
        "aten.add.Tensor",
        '{"args":[{"input":0},{"input":7}],"kwargs":{"alpha":1}}',
        floats((2,), (2,)),
        floats((2,)),
        "reads operand 7; expected one of the 2",
    ),
    "another number of outputs": (
        "aten.sin.default",
        ONE,
        floats((2,)),
        floats((2,), (2,)),
        "has 2 outputs; expected 1",
    ),
    "arguments that the operator has not": (
        "aten.sin.default",
        TWO,
        floats((2,), (2,)),
        floats((2,)),
        "every argument of the operator's schema is written",
    ),
    "arguments that cannot be read": (
        "aten.sin.default",
        '{"args":' + "[" * 10**5,
        floats((2,)),
        floats((2,)),
        "cannot be read",
    ),
    "a shape that follows from contents": (
        "aten.nonzero.default",
        ONE,
        floats((2,)),
        numbers(2, 1),
        "no file may",
    ),
    "a number and no tensor": (
        "aten.is_same_size.default",
        TWO,
        floats((2,), (2,)),
        floats(()),
        "no file may",
    ),
    "an operator that writes": ("aten.relu_.default", "", floats((2,)), floats((2,)), "writes"),
}


@pytest.mark.parametrize("case", GENERIC)
def test_generic_calls_are_what_their_operator_makes(case: str) -> None:
    op, call, ins, outs, said = GENERIC[case]
    found = generic(op, call, ins, outs)
    assert re.search(said, found) if said else found == ""


def test_a_result_that_is_left_out_is_absent() -> None:
    """An output mask leaves results out; a file cannot have them."""
    call = (
        '{"args":[{"input":0},{"input":1},[3],{"input":2},{"input":2},null,null,'
        '[true,false,false]],"kwargs":{}}'
    )
    ins, op = floats((2, 3), (2, 3), (2, 1)), "aten.native_layer_norm_backward.default"
    assert generic(op, call, ins, [*floats((2, 3)), None, None]) == ""
    said = generic(op, call, ins, [*floats((2, 3), (3,)), None])
    assert "output 1 is f32[3], but the call makes no such output" in said


def test_tensors_of_several_ranks_are_not_joined() -> None:
    said = complaint("concat", {"dim": 1}, floats((2, 3), (2,)), floats((2, 4)))
    assert "alike in all but the length of dimension 1" in said
