"""What is used of torch under names that it does not promise to keep.

What always holds: a test says of each what is relied on (``tests/ir/test_torch_internals.py``), so
that a release of torch that changes one is found there and nowhere else.
"""

from __future__ import annotations

import ctypes
import logging
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from importlib import import_module
from operator import attrgetter
from pathlib import Path
from typing import Any

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
from torch.nn.modules.transformer import _detect_is_causal_mask
from torch.nn.utils import clip_grad_norm_
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

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
    "as_kernels_make",
    "assert_later",
    "backward_class",
    "begin_memory_reports",
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
    "note_step",
    "operator_of",
    "overload_of",
    "preload_compiler",
    "registering_module",
    "schema_of",
    "set_backward_class",
    "set_versions",
    "storage_info",
    "storage_key",
    "tracing",
    "tree_leaves",
    "unsaved_buffers",
    "version_of",
    "versions_in",
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


_Results = Sequence[torch.Tensor | None]
_Correct = Callable[[Sequence[Any], Sequence[Any]], tuple[Any, ...]]


def as_kernels_make(
    overload: OpOverload, results: Sequence[Any], args: Sequence[Any]
) -> tuple[Any, ...]:
    """Fake results as the CPU's kernels make them, where the fake kernels say otherwise.

    ``args`` are the arguments of the call by place.
    """
    correct = _KERNELS_MAKE.get(overload)
    return tuple(results) if correct is None else correct(results, args)


def _all_contiguous(results: _Results, args: Sequence[Any]) -> tuple[torch.Tensor | None, ...]:
    """Where an input is not, fake results take over its strides."""
    return tuple(r if r is None else r.new_empty(r.shape) for r in results)


def _as_argument(number: int) -> _Correct:
    """In the memory format of an argument: channels last or contiguous, nothing between."""

    def laid_out(results: _Results, args: Sequence[Any]) -> tuple[torch.Tensor | None, ...]:
        first, *others = _all_contiguous(results, args)
        given = args[number]
        last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(given.dim())
        is_last = last is not None and given.is_contiguous(memory_format=last)
        if first is not None and last is not None and is_last and not given.is_contiguous():
            first = first.to(memory_format=last)
        return first, *others

    return laid_out


def _element_by_element(*numbers: int) -> _Correct:
    """As a product of these arguments, or of one with a number, lies: the first counts most."""

    def laid_out(results: _Results, args: Sequence[Any]) -> tuple[torch.Tensor | None, ...]:
        first, *others = (args[number] for number in numbers)
        like = torch.ops.aten.mul.Tensor(first, *others) if others else torch.empty_like(first)
        return tuple(r if r is None else torch.empty_like(like, dtype=r.dtype) for r in results)

    return laid_out


def _summed_in_double(
    results: Sequence[torch.Tensor], args: Sequence[Any]
) -> tuple[torch.Tensor, ...]:
    """In torch 2.9 fake sums of exponentials are f32 also where the attention is f64."""
    out, sums = results
    return out, sums.to(torch.promote_types(out.dtype, torch.float32))


_ATEN = torch.ops.aten
_LIE_AS = {
    _element_by_element(0): (_ATEN.log_sigmoid_backward.default,),
    _element_by_element(0, 5): (_ATEN.elu_backward.default,),
    _element_by_element(0, 1): (
        _ATEN.hardsigmoid_backward.default,
        _ATEN.hardswish_backward.default,
        _ATEN.hardtanh_backward.default,
        _ATEN.logit_backward.default,
        _ATEN.native_dropout_backward.default,
        _ATEN.softplus_backward.default,
        _ATEN.xlogy.Tensor,
    ),
    _element_by_element(1, 0): (
        _ATEN._prelu_kernel_backward.default,
        _ATEN.leaky_relu_backward.default,
        _ATEN.threshold_backward.default,
    ),
    _element_by_element(2, 0): (_ATEN.rrelu_with_noise_backward.default,),
    _as_argument(0): (_ATEN.native_batch_norm.default,),
    _as_argument(1): (
        _ATEN.native_batch_norm_backward.default,
        _ATEN.native_group_norm_backward.default,
        _ATEN.reflection_pad2d_backward.default,
        _ATEN.reflection_pad3d_backward.default,
        _ATEN.replication_pad2d_backward.default,
        _ATEN.replication_pad3d_backward.default,
    ),
    _all_contiguous: (
        _ATEN._log_softmax_backward_data.default,
        _ATEN._softmax_backward_data.default,
        _ATEN.glu_backward.default,
        _ATEN.huber_loss_backward.default,
        _ATEN.log_sigmoid_forward.default,
        _ATEN.mse_loss_backward.default,
        _ATEN.native_layer_norm_backward.default,
        _ATEN.pow.Scalar,
        _ATEN.smooth_l1_loss_backward.default,
    ),
    _summed_in_double: (_ATEN._scaled_dot_product_flash_attention_for_cpu.default,),
}
"""How results lie, and of which operators."""
_KERNELS_MAKE: dict[object, _Correct] = {
    overload: correct for correct, overloads in _LIE_AS.items() for overload in overloads
}


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


def versions_in(state: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """What a state dict says of each module's version; None where it says nothing."""
    found: Mapping[str, Any] | None = getattr(state, "_metadata", None)
    return found


def set_versions(state: OrderedDict[str, Any], versions: Mapping[str, Any]) -> None:
    """Let a state dict say each module's version."""
    state._metadata = versions  # type: ignore[attr-defined]


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
