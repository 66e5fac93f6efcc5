"""What is used of torch under names that it does not promise to keep.

Invariant: a test says of each what is relied on (``tests/test_torch_internals.py``), so
that a release of torch that changes one is found there and nowhere else.
"""

from __future__ import annotations

import ctypes
import logging
import sys
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, partial
from importlib import import_module
from operator import attrgetter
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import torch
import torch.fx
from torch import nn
from torch._dispatch.python import enable_python_dispatcher
from torch._guards import TracingContext, tracing
from torch._library.custom_ops import OPDEFS
from torch._library.simple_registry import singleton
from torch._ops import HigherOrderOperator, OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.distributed_c10d import Store, _get_default_store
from torch.fx.experimental.sym_node import SymNode
from torch.nn.modules.transformer import _detect_is_causal_mask
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import ChainedScheduler, LRScheduler, SequentialLR
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

__all__ = [
    "AUTOCAST_SWITCHES",
    "BEGINS_RANGE",
    "DETECTS_CAUSAL_MASK",
    "MODULE_CALL",
    "NO_GRAD_WRAPPER",
    "SET_GRAD_ENABLED",
    "FakeTensor",
    "FakeTensorMode",
    "HigherOrderOperator",
    "OpOverload",
    "TorchDispatchMode",
    "TracingContext",
    "add_to_all",
    "assert_later",
    "backward_class",
    "begin_memory_reports",
    "checks_hold",
    "compiling_here",
    "copy_all",
    "default_store",
    "enable_python_dispatcher",
    "end_memory_reports",
    "end_pool",
    "has_backward_hooks",
    "has_gradient_hooks",
    "has_kernel_for",
    "has_step_hooks",
    "is_composite",
    "is_fused_step",
    "keeps_graph",
    "log_level",
    "never_compiled",
    "note_step",
    "operator_of",
    "overload_of",
    "preload_compiler",
    "registering_module",
    "schedulers_in",
    "schema_of",
    "set_backward_class",
    "storage_info",
    "storage_key",
    "tracing",
    "tree_leaves",
    "tree_map_only",
    "unsaved_buffers",
    "version_of",
    "without_autocast",
    "without_dispatch_modes",
    "without_fake_failures",
    "without_torch_function",
]


def storage_key(tensor: torch.Tensor) -> int:
    """What tells storages apart: tensors on meta and fake ones share them exactly as real ones do.

    Another storage may have the number once this one is gone.
    """
    return int(tensor.untyped_storage()._cdata)


def operator_of(overload: OpOverload) -> str:
    """``aten.add.Tensor`` is of the operator ``add``."""
    return str(overload._opname)


def overload_of(overload: OpOverload) -> str:
    """``aten.add.Tensor`` is the overload ``Tensor``."""
    return str(overload._overloadname)


def schema_of(overload: OpOverload) -> torch.FunctionSchema:
    """Arguments and results of an operator, with their types, defaults and aliases."""
    return overload._schema


def is_composite(overload: OpOverload) -> bool:
    """Whether torch runs the operator as others, whatever the device."""
    key = torch._C.DispatchKey.CompositeImplicitAutograd
    return bool(overload.has_kernel_for_dispatch_key(key))


def has_kernel_for(overload: OpOverload, key: str) -> bool:
    """Whether an operator has a kernel of its own for a dispatch key, like ``AutocastCPU``."""
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(overload.name(), key))


def without_torch_function() -> AbstractContextManager[None]:
    """Lets calls of torch pass function modes and tensors' own ways unseen."""
    guard: AbstractContextManager[None] = torch._C.DisableTorchFunction()
    return guard


_Function = TypeVar("_Function", bound=Callable[..., Any])


class _Holding(TorchDispatchMode):
    """Operators that ask whether a fake tensor is true hear that it is."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.equal.default and isinstance(args[0], FakeTensor):
            return True
        return func(*args, **(kwargs or {}))


_QUANTILES = (torch.ops.aten.quantile.scalar, torch.ops.aten.nanquantile.scalar)
_CHECKS_FAKES = torch.__version__ < "2.13"


def checks_hold(overload: OpOverload) -> AbstractContextManager[object]:
    """Lets an operator that checks the contents of its arguments run on fake tensors.

    In old releases of torch those of `_QUANTILES` hold a number that they have made a tensor to
    its range, and fail where the tensor is fake.
    """
    checks = _CHECKS_FAKES and overload in _QUANTILES
    mode: Callable[[], AbstractContextManager[object]] = _Holding if checks else nullcontext
    return mode()


def _unchecked(overload: OpOverload, *args: Any, **kwargs: Any) -> Any:
    with checks_hold(overload):
        return overload._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args, **kwargs)


for _overload in _QUANTILES if _CHECKS_FAKES else ():  # what tracers call, as in newer releases
    if torch._C.DispatchKey.CompositeImplicitAutograd not in _overload.py_kernels:
        kernel = _overload.py_impl(torch._C.DispatchKey.CompositeImplicitAutograd)
        kernel(partial(_unchecked, _overload))


def _with_states(kernel: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    made, *states = kernel(*args, **kwargs)
    given = next(item for item in args if isinstance(item, (list, tuple)))
    return made, *(state.reshape(first.shape) for state, first in zip(states, given, strict=True))


if torch.__version__ < "2.13":  # 2.9 gives a traced LSTM's states a dimension too many
    for _overload in (torch.ops.aten.lstm.input, torch.ops.aten.lstm.data):
        _overload.py_kernels.update(
            {key: partial(_with_states, kernel) for key, kernel in _overload.py_kernels.items()}
        )
        _overload._dispatch_cache.clear()


def is_fused_step(overload: OpOverload) -> bool:
    """Whether an operator is the step of a fused optimizer, in place or not.

    These have no fake kernel, so a mode of fake tensors runs the real one, on real memory.
    """
    return overload.namespace == "aten" and operator_of(overload).rstrip("_") in _FUSED_STEPS


_FUSED_STEPS = frozenset({"_fused_adagrad", "_fused_adam", "_fused_adamw", "_fused_sgd"})


def without_dispatch_modes() -> AbstractContextManager[object]:
    """Lets operators run as if no `TorchDispatchMode` were active, fake tensors' included."""
    modes: AbstractContextManager[object] = _disable_current_modes()
    return modes


def keeps_graph() -> bool:
    """Whether the backward that runs was given ``retain_graph=True``.

    torch has no public word for it; its own compiled functions ask in the same way.
    """
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def without_autocast() -> AbstractContextManager[None]:
    """Lets operators compute as if `torch.autocast` were off, on whatever device they are."""
    guard: AbstractContextManager[None] = torch._C._DisableAutocast()
    return guard


MODULE_CALL = nn.Module._call_impl.__code__
"""The code whose frames are calls of a module: ``f_locals["self"]`` is the module."""

SET_GRAD_ENABLED = torch._C._set_grad_enabled
"""What `torch.no_grad` and its like call, as function modes see it."""

NO_GRAD_WRAPPER = clip_grad_norm_.__code__
"""The code of what stands around `clip_grad_norm_` and its like: ``f_locals`` of its frames are
``func``, the function itself, and its ``args`` and ``kwargs``."""

BEGINS_RANGE = torch.ops.profiler._record_function_enter_new
"""What a range of the profiler calls with its name; an optimizer's are ``Optimizer.step#Adam...``
and ``Optimizer.zero_grad#Adam...``."""

DETECTS_CAUSAL_MASK = _detect_is_causal_mask.__code__
"""The code by which `nn.Transformer` looks whether the mask that it is given is a causal one."""


class _InOneThread:
    """True in the thread that made it, until it is let go, and false in all others."""

    def __init__(self) -> None:
        self._thread: int | None = threading.get_ident()

    def __bool__(self) -> bool:
        return threading.get_ident() == self._thread

    def __or__(self, other: Any) -> Any:
        return bool(self) | other

    def __and__(self, other: Any) -> Any:
        return bool(self) & other

    __ror__, __rand__ = __or__, __and__

    def let_go(self) -> None:
        """False everywhere from now on: whoever saved it may put it back later."""
        self._thread = None


_COMPILING = ("_is_compiling_flag", "_is_exporting_flag")


@contextmanager
def without_fake_failures() -> Iterator[None]:
    """Lets torch log nothing where an operator cannot run on fake tensors; it raises as well."""
    _thread.quiet = True
    try:
        yield
    finally:
        _thread.quiet = False


_thread = threading.local()
logging.getLogger("torch._subclasses.fake_tensor").addFilter(
    lambda record: not getattr(_thread, "quiet", False)
)


@contextmanager
def compiling_here() -> Iterator[None]:
    """`torch.compiler.is_compiling` and `is_exporting` are true in this thread, and in it alone.

    torch has one flag for all threads, and optimizers that step in another one compute otherwise
    where it is true.
    """
    flag, compiler = _InOneThread(), vars(torch.compiler)
    before = {name: compiler[name] for name in _COMPILING if not compiler.get(name, True)}
    compiler.update(dict.fromkeys(before, flag))
    try:
        yield
    finally:
        flag.let_go()
        compiler.update({name: value for name, value in before.items() if compiler[name] is flag})


def never_compiled(function: _Function) -> _Function:
    """The function, into which torch.compile does not look: it raises where it would have to.

    `torch.compiler.disable` says the same, but imports the compiler, which takes seconds.
    """
    marks = {"": True, "_msg": None, "_recursive": True}
    vars(function).update({f"_torchdynamo_disable{mark}": on for mark, on in marks.items()})
    return function


def assert_later(holds: torch.Tensor) -> None:
    """Let the device fail where a tensor of one element is false, without waiting for it."""
    torch._assert_async(holds)


def end_pool(device: int, pool: tuple[int, int]) -> None:
    """Let a recording that failed take no more memory of a GPU from its pool.

    RuntimeError where it takes none.
    """
    torch._C._cuda_endAllocateToPool(device, pool)


def begin_memory_reports() -> None:
    """Have the CPU's allocator report to this thread until `end_memory_reports`."""
    config = _autograd.ProfilerConfig(
        _autograd.ProfilerState.CPU,
        False,  # report_input_shapes
        True,  # profile_memory
        False,  # with_stack
        False,  # with_flops
        False,  # with_modules
        torch._C._profiler._ExperimentalConfig(),
    )
    _autograd._enable_profiler_legacy(config)


def end_memory_reports() -> list[int]:
    """The bytes that were allocated (above 0) and given back (below 0), in order."""
    records = (record for thread in _autograd._disable_profiler_legacy() for record in thread)
    return [r.cpu_memory_usage() for r in records if r.kind() == "memory_alloc"]


_autograd: Any = torch.autograd  # what it declares is not all that it has


def copy_all(to: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copy each source to its target, in one call."""
    torch._foreach_copy_(to, sources)


def add_to_all(tensors: list[torch.Tensor], number: float) -> None:
    """Add a number to each tensor in place, in one call."""
    torch._foreach_add_(tensors, number)


def note_step(optimizer: torch.optim.Optimizer) -> None:
    """Let schedulers know that a step was made: they warn where a rate changes before the first."""
    optimizer._opt_called = True  # type: ignore[attr-defined]


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
    kernel = singleton.find(name).fake_impl.kernel
    return "" if kernel is None else _module_of_file(kernel.source.rpartition(":")[0])


def _module_of_file(file: str) -> str:
    """A loaded module's name by its file; torch wraps fake kernels in functions of its own."""
    loaded = list(sys.modules.items())
    return next((name for name, module in loaded if getattr(module, "__file__", None) == file), "")


AUTOCAST_SWITCHES = (
    torch.amp.autocast_mode._enter_autocast,
    torch.amp.autocast_mode._exit_autocast,
)
"""What tracers note where a ``with torch.autocast`` begins and ends."""

version_of: Callable[[torch.Tensor], int] = attrgetter("_version")
"""How often a tensor's memory has been written to, by what torch counts."""


def unsaved_buffers(module: nn.Module) -> Collection[str]:
    """The names of a module's own buffers that no checkpoint holds."""
    return module._non_persistent_buffers_set


def has_backward_hooks(module: nn.Module) -> bool:
    """Whether a module itself has hooks on its backward."""
    return bool(module._backward_hooks or module._backward_pre_hooks)


def has_gradient_hooks(parameter: torch.Tensor) -> bool:
    """Whether a leaf has hooks on its gradient."""
    after = getattr(parameter, "_post_accumulate_grad_hooks", None)
    return bool(parameter._backward_hooks or after)


def has_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer has hooks of its own around its step."""
    return bool(optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks)


def schedulers_in(scheduler: LRScheduler) -> Iterator[LRScheduler]:
    """A scheduler, and those that a SequentialLR or ChainedScheduler in it steps."""
    yield scheduler
    if isinstance(scheduler, (SequentialLR, ChainedScheduler)):
        for inner in scheduler._schedulers:
            yield from schedulers_in(inner)


def backward_class(function: type[torch.autograd.Function]) -> type:
    """The class of what runs a Function's backward, and is the ``ctx`` of its forward."""
    found: type = function._backward_cls
    return found


def set_backward_class(function: type[torch.autograd.Function], cls: type) -> None:
    """Have another class, derived from `backward_class`, run a Function's backward."""
    function._backward_cls = cls


def default_store() -> Store:
    """The store by which torch.distributed's first process group was made."""
    return _get_default_store()


def storage_info(file: str, offset: int, length: int) -> Any:
    """Where in a checkpoint's files a tensor is, as torch.distributed.checkpoint says it."""
    filesystem = import_module("torch.distributed.checkpoint.filesystem")
    return filesystem._StorageInfo(file, offset, length)


def preload_compiler() -> None:
    """Import what torch imports when a process first runs a custom operator; it takes seconds."""
    import_module("torch._dynamo")


class _WatchedNode(SymNode):
    """A symbolic size that says where Python asks for its text or its hash."""

    seen: Callable[[FrameType | None], None]

    def _graph_repr(self) -> str:
        self.seen(sys._getframe(2))  # Behind SymInt's own __repr__.
        return self.str()

    def is_nested_int(self) -> bool:
        """What `SymInt.__hash__` asks before it refuses."""
        caller = sys._getframe(1)
        if caller.f_code is torch.SymInt.__hash__.__code__:
            self.seen(caller.f_back)
        return bool(super().is_nested_int())


def watch_symbol(number: torch.SymInt, seen: Callable[[FrameType | None], None]) -> None:
    """Call ``seen`` with the frame that makes a text or a hash of a symbolic size.

    Tensors of that size give the same symbol.
    """
    number.node.__class__ = _WatchedNode
    number.node.seen = seen
