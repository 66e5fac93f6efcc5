"""The native kernels from Python: load the library, bind calls, run programs of them.

A call is bound by its kind, attributes and operands (each by its buffer's index and an offset), or
the reason is given why the kernel does not do it. A `NativeProgram` of bound calls is run by one
call of C on an array of base addresses. It keeps its calls alive, but no tensor: whoever runs it
holds what the addresses point to. Runs of one program from several threads wait for one another.

``SHARDWRIGHT_NATIVE=0`` turns native kernels off.
"""

from __future__ import annotations

import ctypes
import os
import warnings
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from shardwright.errors import ExecError
from shardwright.ir.tensor_meta import DTYPES, overlaps
from shardwright.kernels.lowered import BY_ID
from shardwright.kernels.native.build import built_library
from shardwright.kernels.row import ABSENT

MAX_DIMS = 8
_STATIC = 1
_DTYPE_NUMBERS = {name: number for number, name in enumerate(DTYPES)}
SYMBOLS = (
    "sgemm_",
    "dgemm_",
    "MKL_Set_Num_Threads_Local",
)
"""What kernels call in torch's own libraries, in the order of ``struct Blas``."""


class LoggedCall(NamedTuple):
    """One call that returned: the number and kind it was bound with, and how long it took.

    The caller reads them off it, not off the plan: the native loop in runtime.cpp for
    its calls, `segments` for those of torch.
    """

    number: int
    kind_id: int
    native: bool
    seconds: float


CallLog = list[LoggedCall]


@dataclass(frozen=True, slots=True)
class NativeOperand:
    """Where an operand lies and how: buffer index, bytes from its base, strides in elements.

    ``static`` promises that its contents do not change between runs, but by `BoundCall.prepare`.
    """

    buffer: int
    offset: int
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    static: bool = False


class _CallOperand(ctypes.Structure):
    _fields_ = (
        ("offset", ctypes.c_int64),
        ("buffer", ctypes.c_int32),
        ("dtype", ctypes.c_int32),
        ("flags", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("sizes", ctypes.c_int64 * MAX_DIMS),
        ("strides", ctypes.c_int64 * MAX_DIMS),
    )


class _CallSpec(ctypes.Structure):
    _fields_ = (
        ("kind", ctypes.c_int32),
        ("schema", ctypes.c_int32),
        ("n_in", ctypes.c_int32),
        ("n_out", ctypes.c_int32),
        ("operands", ctypes.POINTER(_CallOperand)),
        ("blob", ctypes.c_char_p),
        ("blob_size", ctypes.c_int64),
    )


class _Logged(ctypes.Structure):
    _fields_ = (
        ("number", ctypes.c_int32),
        ("kind", ctypes.c_int32),
        ("seconds", ctypes.c_double),
    )


class _Log(ctypes.Structure):
    _fields_ = (("calls", ctypes.POINTER(_Logged)), ("count", ctypes.c_int64))


class BoundCall:
    """A call that a kernel has taken."""

    def __init__(self, dll: ctypes.CDLL, handle: int) -> None:
        self.handle = handle
        self._dll = dll
        weakref.finalize(self, dll.sw_release, handle)

    def prepare(self, bases: ctypes.Array[ctypes.c_void_p], threads: int = 1) -> None:
        """Reads the static operands: once before the first run, and when they were replaced."""
        if self._dll.sw_prepare(self.handle, bases, threads):
            raise ExecError("there is no memory for the packed operands of a call")


class NativeProgram:
    """Calls in order, run by one call of C.

    work_at
        Where, in bytes from the first base, there are `work_bytes` that calls may work in, 64-byte
        aligned; without it they keep memory of their own.
    """

    def __init__(self, dll: ctypes.CDLL, bounds: Sequence[BoundCall], work_at: int = -1) -> None:
        self.bounds = tuple(bounds)
        handles = (ctypes.c_void_p * len(bounds))(*(bound.handle for bound in bounds))
        self._handle = dll.sw_program(handles, len(bounds), work_at)
        self.work_bytes: int = dll.sw_work_bytes(self._handle)
        self._run, self._run_logged, self._failure = dll.sw_run, dll.sw_run_logged, dll.sw_failure
        # The bounds stand among the arguments so that none is released before the program.
        weakref.finalize(self, _release_program, dll, self._handle, self.bounds)

    def run(
        self, bases: ctypes.Array[ctypes.c_void_p], threads: int = 1, log: CallLog | None = None
    ) -> None:
        """Runs on these base addresses. Raises ExecError where a kernel gave up.

        What was called is written into ``log``, by the loop that calls it.
        """
        if log is None:
            failed = self._run(self._handle, bases, threads)
        else:
            calls = (_Logged * len(self.bounds))()
            found = _Log(calls, 0)
            failed = self._run_logged(self._handle, bases, threads, ctypes.byref(found))
            log += (LoggedCall(c.number, c.kind, True, c.seconds) for c in calls[: found.count])
        if failed:
            said = self._failure().decode()
            raise ExecError(f"native call {failed - 1} of {len(self.bounds)}: {said}")


def _release_program(dll: ctypes.CDLL, handle: int, bounds: tuple[BoundCall, ...]) -> None:
    dll.sw_release_program(handle)


class Library:
    """The loaded kernels."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._dll = ctypes.CDLL(str(path))
        _declare(self._dll)
        symbols = blas_symbols()
        self._dll.sw_set_blas((ctypes.c_void_p * len(symbols))(*symbols), len(symbols))

    def bind(
        self,
        kind: int,
        schema: int,
        blob: bytes,
        operands: Sequence[NativeOperand | None],
        n_in: int,
        *,
        number: int = 0,
    ) -> BoundCall | str:
        """A call of a kind, inputs before outputs, None for what is absent; or why not.

        Kernels rely on what is looked at here: operands are as many as the kind has, those that it
        needs are there, and none is empty.
        """
        if misfit := _misfit(kind, operands, n_in):
            return misfit
        if any(len(operand.shape) > MAX_DIMS for operand in operands if operand):
            return f"an operand has more than {MAX_DIMS} dimensions"
        if any(overlaps(operand.shape, operand.strides) for operand in operands[n_in:] if operand):
            return "elements of an output lie on one another"
        table = (_CallOperand * len(operands))(*map(_pack, operands))
        spec = _CallSpec(kind, schema, n_in, len(operands) - n_in, table, blob, len(blob))
        why = ctypes.create_string_buffer(512)
        handle = self._dll.sw_bind(ctypes.byref(spec), number, why, len(why))
        return BoundCall(self._dll, handle) if handle else why.value.decode()

    def program(self, bounds: Sequence[BoundCall], work_at: int = -1) -> NativeProgram:
        """One program of these calls."""
        return NativeProgram(self._dll, bounds, work_at)


def addresses(values: Sequence[int | None]) -> ctypes.Array[ctypes.c_void_p]:
    """Base addresses as a program takes them; single ones may be set later by index."""
    return (ctypes.c_void_p * len(values))(*values)


@cache
def load() -> Library | None:
    """The kernels; None where they are turned off or cannot be had, which is said once."""
    if os.environ.get("SHARDWRIGHT_NATIVE") == "0":
        return None
    try:
        return Library(built_library())
    except (ExecError, OSError) as error:
        warnings.warn(
            f"shardwright runs without its native kernels, slower: {error}\n"
            "SHARDWRIGHT_NATIVE=0 silences this.",
            RuntimeWarning,
            stacklevel=2,
        )
        return None


def blas_symbols() -> list[int | None]:
    """The addresses of `SYMBOLS` in the BLAS that torch brings; None for what it lacks."""
    path = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    if not path.exists():
        return [None] * len(SYMBOLS)
    torch_library = ctypes.CDLL(str(path))
    return [_address(torch_library, name) for name in SYMBOLS]


def _address(library: ctypes.CDLL, name: str) -> int | None:
    try:
        return ctypes.cast(getattr(library, name), ctypes.c_void_p).value
    except AttributeError:
        return None


def _pack(operand: NativeOperand | None) -> _CallOperand:
    if operand is None:
        return _CallOperand(buffer=-1)
    packed = _CallOperand(
        operand.offset,
        operand.buffer,
        _DTYPE_NUMBERS[operand.dtype],
        _STATIC if operand.static else 0,
        len(operand.shape),
    )
    packed.sizes[: len(operand.shape)] = operand.shape
    packed.strides[: len(operand.shape)] = operand.strides
    return packed


def _misfit(kind: int, operands: Sequence[NativeOperand | None], n_in: int) -> str:
    """What kernels of any kind do not take; empty where nothing is wrong."""
    known = BY_ID.get(kind)
    if known is None:
        return "no native kernel of this kind"
    n_out = len(operands) - n_in
    if n_in < 0 or n_out < 0 or not known.takes(n_in, n_out):
        return f"{n_in} inputs and {n_out} outputs; its operands are {known.operands}"
    there = [ABSENT if operand is None else 0 for operand in operands]
    if absent := known.missing(there[:n_in], there[n_in:]):
        return f"{absent} is absent"
    if any(0 in operand.shape for operand in operands if operand):
        return "an operand is empty"
    return ""


def _declare(dll: Any) -> None:
    """The types of the C interface in runtime.cpp."""
    pointer, text, long, number = (
        ctypes.c_void_p,
        ctypes.c_char_p,
        ctypes.c_int64,
        ctypes.c_int,
    )
    for name, result, *arguments in (
        ("sw_set_blas", None, pointer, long),
        ("sw_bind", pointer, pointer, number, text, long),
        ("sw_release", None, pointer),
        ("sw_prepare", number, pointer, pointer, number),
        ("sw_program", pointer, pointer, long, long),
        ("sw_work_bytes", long, pointer),
        ("sw_release_program", None, pointer),
        ("sw_run", long, pointer, pointer, number),
        ("sw_run_logged", long, pointer, pointer, number, pointer),
        ("sw_failure", text),
    ):
        function = getattr(dll, name)
        function.restype, function.argtypes = result, arguments
