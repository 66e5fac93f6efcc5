"""What is used of torch under names that it does not promise to keep.

What always holds: a test says of each what is relied on (``tests/ir/test_torch_internals.py``), so
that a release of torch that changes one is found there and nowhere else.
"""

from __future__ import annotations

import ctypes
import sys
from contextlib import AbstractContextManager
from functools import cache
from pathlib import Path

import torch
from torch._library.custom_ops import OPDEFS
from torch._library.simple_registry import singleton
from torch._ops import HigherOrderOperator, OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode

__all__ = [
    "FakeTensorMode",
    "HigherOrderOperator",
    "OpOverload",
    "end_pool",
    "is_composite",
    "log_level",
    "registering_module",
    "storage_key",
    "without_autocast",
]


def storage_key(tensor: torch.Tensor) -> int:
    """What tells storages apart: tensors on meta and fake ones share them exactly as real ones do.

    Another storage may have the number once this one is gone.
    """
    return int(tensor.untyped_storage()._cdata)


def is_composite(overload: OpOverload) -> bool:
    """Whether torch runs the operator as others, whatever the device."""
    key = torch._C.DispatchKey.CompositeImplicitAutograd
    return bool(overload.has_kernel_for_dispatch_key(key))


def without_autocast() -> AbstractContextManager[None]:
    """Lets operators compute as if `torch.autocast` were off, on whatever device they are."""
    guard: AbstractContextManager[None] = torch._C._DisableAutocast()
    return guard


def end_pool(device: int, pool: tuple[int, int]) -> None:
    """Let a recording that failed take no more memory of a GPU from its pool.

    RuntimeError where it takes none.
    """
    torch._C._cuda_endAllocateToPool(device, pool)


@cache
def log_level() -> ctypes.c_int | None:
    """How grave a message of torch's C++ must be to be printed: 1 a warning, 2 an error.

    Setting ``.value`` changes it for the process; ``TORCH_CPP_LOG_LEVEL`` is what it begins with,
    read when torch is imported. None where torch was built with another way of logging.
    """
    (library, *_) = [*Path(torch.__file__).parent.glob("lib/libc10.*"), None]
    try:
        return ctypes.c_int.in_dll(ctypes.CDLL(str(library)), "FLAGS_caffe2_log_level")
    except (OSError, ValueError):
        return None


def registering_module(name: str) -> str:
    """The module that registers the operator ``namespace::name`` by `torch.library`.

    It is that of the operator's function, or of its fake kernel; ``""`` where it has neither.
    """
    definition = OPDEFS.get(name)
    if definition is not None:
        return str(definition._init_fn.__module__)
    entry = singleton.get(name)
    kernel = entry.fake_impl.kernel if entry is not None else None
    return "" if kernel is None else _module_of_file(kernel.source.rpartition(":")[0])


def _module_of_file(file: str) -> str:
    """A loaded module's name by its file; torch wraps fake kernels in functions of its own."""
    loaded = list(sys.modules.items())
    return next((name for name, module in loaded if getattr(module, "__file__", None) == file), "")
