"""What is relied on of torch under names that it does not promise to keep."""

import sys
import threading

import pytest
import torch
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.overrides import TorchFunctionMode

from shardwright.ir import resolve
from shardwright.torch_internals import (
    DETECTS_CAUSAL_MASK,
    MODULE_CALL,
    SET_GRAD_ENABLED,
    FakeTensorMode,
    OpOverload,
    add_to_all,
    backward_class,
    begin_memory_reports,
    checks_hold,
    compiling_here,
    copy_all,
    default_store,
    enable_python_dispatcher,
    end_memory_reports,
    end_pool,
    has_backward_hooks,
    has_gradient_hooks,
    has_kernel_for,
    has_step_hooks,
    is_composite,
    keeps_graph,
    log_level,
    never_compiled,
    note_step,
    operator_of,
    overload_of,
    registering_module,
    schedulers_in,
    schema_of,
    set_backward_class,
    storage_info,
    storage_key,
    unsaved_buffers,
    version_of,
    watch_symbol,
    without_autocast,
    without_dispatch_modes,
    without_torch_function,
)


def on(place):
    """Two tensors with a storage each."""
    if place == "fake":
        with FakeTensorMode():
            return torch.empty(3), torch.empty(3)
    return torch.empty(3, device=place), torch.empty(3, device=place)


@pytest.mark.parametrize("place", ["cpu", "meta", "fake"])
def test_tensors_know_their_storage(place):
    a, b = on(place)
    assert storage_key(a) == storage_key(a[1:]) == storage_key(a.view(3, 1).detach())
    assert storage_key(a) != storage_key(b)


def test_a_pool_that_takes_no_memory_cannot_be_ended():
    with pytest.raises(RuntimeError):
        end_pool(0, (0, 10**6))


def test_an_operator_is_an_overload():
    assert isinstance(torch.ops.aten.add.Tensor, OpOverload)
    assert not isinstance(torch.ops.aten.add, OpOverload)


def test_fake_tensors_have_shapes_and_strides_and_nothing_else():
    with FakeTensorMode():
        made = torch.empty(10**6, 10**6, dtype=torch.float64).T @ torch.empty(10**6, 2).double()
    assert made.shape == (10**6, 2)
    assert made.device.type == "cpu"


@pytest.mark.parametrize(
    ("op", "expected"),
    [
        ("aten.linear.default", True),
        ("aten.matmul.default", True),
        ("aten.softmax.int", True),
        ("aten.mm.default", False),
        ("aten._softmax.default", False),
        ("aten.add.Tensor", False),
    ],
)
def test_composites_are_told_from_kernels(op, expected):
    assert is_composite(resolve(op)) is expected


def test_autocast_is_off_on_all_devices():
    x = torch.ones(2, 2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert (x @ x).dtype == torch.bfloat16
        with without_autocast():
            assert (x @ x).dtype == torch.float32
        assert (x @ x).dtype == torch.bfloat16


def test_operators_know_the_module_that_registers_them():
    @torch.library.custom_op("internals_test::twice", mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    torch.library.define("internals_test::thrice", "(Tensor x) -> Tensor")

    @torch.library.register_fake("internals_test::thrice")
    def thrice(x):
        return torch.empty_like(x)

    torch.library.define("internals_test::bare", "(Tensor x) -> Tensor")
    assert registering_module("internals_test::twice") == __name__
    assert registering_module("internals_test::thrice") == __name__
    assert registering_module("internals_test::bare") == ""


def test_the_level_of_torchs_messages_is_known_and_can_be_set():
    level = log_level()
    assert level is not None
    before = level.value
    assert before in (0, 1, 2, 3)
    level.value = 2
    assert log_level().value == 2
    level.value = before


def test_operators_know_their_names_and_their_schema():
    overload = torch.ops.aten.add.Tensor
    assert (operator_of(overload), overload_of(overload)) == ("add", "Tensor")
    assert [argument.name for argument in schema_of(overload).arguments] == [
        *("self", "other", "alpha"),
    ]


@pytest.mark.parametrize(
    ("op", "expected"), [("aten.linear.default", True), ("aten.neg.default", False)]
)
def test_operators_know_whether_autocast_treats_them(op, expected):
    assert has_kernel_for(resolve(op), "AutocastCPU") is expected


def test_fake_tensors_are_left_behind_without_dispatch_modes():
    with FakeTensorMode(), without_dispatch_modes():
        assert type(torch.ones(2)) is torch.Tensor


@pytest.mark.parametrize("retain", [True, False])
def test_a_backward_knows_whether_its_graph_stays(retain):
    class Asking(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            asked.append(keeps_graph())
            return gradient

    asked = []
    Asking.apply(torch.ones(2, requires_grad=True)).sum().backward(retain_graph=retain)
    assert asked == [retain]


def test_the_allocator_reports_what_is_taken_and_given_back():
    begin_memory_reports()
    made = torch.empty(1000, dtype=torch.float64)
    del made
    assert [change for change in end_memory_reports() if abs(change) >= 8000] == [8000, -8000]


def test_lists_of_tensors_are_copied_and_added_to():
    tensors = [torch.zeros(2), torch.zeros(3)]
    copy_all(tensors, [torch.ones(2), torch.full((3,), 2.0)])
    add_to_all(tensors, 1)
    assert [tensor.tolist() for tensor in tensors] == [[2.0, 2.0], [3.0, 3.0, 3.0]]


def test_schedulers_do_not_warn_of_an_optimizer_whose_step_was_noted():
    optimizer = torch.optim.SGD([torch.zeros(1)], 0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    note_step(optimizer)
    scheduler.step()  # warnings are errors here


def test_a_frame_of_a_modules_call_tells_the_module():
    found = []

    class Looks(torch.nn.Module):
        def forward(self):
            frame = sys._getframe()
            while frame.f_code is not MODULE_CALL:
                frame = frame.f_back
            found.append(frame.f_locals["self"])

    module = Looks()
    module()
    assert found == [module]


def test_torch_is_compiling_in_the_thread_that_says_so():
    asked = (torch.compiler.is_compiling, torch.compiler.is_exporting)
    seen = []
    with compiling_here():
        other = threading.Thread(target=lambda: seen.extend(map(bool, (ask() for ask in asked))))
        other.start()
        other.join()
        assert all(ask() for ask in asked)
        assert asked[0]() | False
        assert not asked[0]() & False
    assert seen == [False, False]
    assert [ask() for ask in asked] == [False, False]


def test_a_flag_that_is_put_back_too_late_says_nothing():
    with compiling_here():
        saved = torch.compiler._is_compiling_flag
    assert not saved


def test_a_transformer_looks_whether_its_mask_is_causal_where_it_is_told():
    mask = torch.nn.Transformer.generate_square_subsequent_mask(3)
    codes = []
    sys.setprofile(lambda frame, *_: codes.append(frame.f_code))
    try:
        layer = torch.nn.TransformerEncoderLayer(4, 2, 4, batch_first=True)
        torch.nn.TransformerEncoder(layer, 1)(torch.ones(1, 3, 4), mask=mask)
    finally:
        sys.setprofile(None)
    assert DETECTS_CAUSAL_MASK in codes


class Seen(TorchFunctionMode):
    """Notes the functions of torch that are called."""

    def __init__(self):
        super().__init__()
        self.functions = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.functions.append(func)
        return func(*args, **(kwargs or {}))


def test_function_modes_see_settings_and_are_passed_on_request():
    x = torch.ones(2)
    with Seen() as mode:
        with torch.no_grad():
            pass
        assert mode.functions == [SET_GRAD_ENABLED, SET_GRAD_ENABLED]
        with without_torch_function():
            x.grad  # noqa: B018
        assert len(mode.functions) == 2


def test_writes_to_a_tensor_are_counted():
    x = torch.zeros(4)
    before = version_of(x)
    x[:2].add_(1)
    assert version_of(x) > before


def test_modules_know_the_buffers_that_no_checkpoint_holds():
    module = torch.nn.Module()
    module.register_buffer("kept", torch.zeros(1))
    module.register_buffer("unsaved", torch.zeros(1), persistent=False)
    assert set(unsaved_buffers(module)) == {"unsaved"}


def test_hooks_are_seen():
    layer, weight = torch.nn.Linear(1, 1), torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], 0.1)
    assert not has_backward_hooks(layer)
    assert not has_gradient_hooks(weight)
    assert not has_step_hooks(optimizer)
    layer.register_full_backward_hook(lambda *_: None)
    weight.register_post_accumulate_grad_hook(lambda _: None)
    optimizer.register_step_pre_hook(lambda *_: None)
    assert has_backward_hooks(layer)
    assert has_gradient_hooks(weight)
    assert has_step_hooks(optimizer)


def test_a_scheduler_of_schedulers_holds_them():
    optimizer = torch.optim.SGD([torch.ones(1)], 0.1)
    first, second = (torch.optim.lr_scheduler.StepLR(optimizer, 2) for _ in range(2))
    chained = torch.optim.lr_scheduler.ChainedScheduler([second])
    whole = torch.optim.lr_scheduler.SequentialLR(optimizer, [first, chained], [3])
    assert [*schedulers_in(whole)] == [whole, first, chained, second]


def test_a_function_runs_its_backward_by_a_class_that_can_be_another():
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            seen.append(type(ctx))
            return x * 2

        @staticmethod
        def backward(ctx, gradient):
            return gradient * 2

    seen = []
    other = type("Other", (backward_class(Double),), {})
    set_backward_class(Double, other)
    result = Double.apply(torch.ones(1, requires_grad=True))
    assert seen == [other]
    assert isinstance(result.grad_fn, other)


def test_a_place_in_a_checkpoint_has_three_fields():
    info = storage_info("file", 8, 16)
    assert (info.relative_path, info.offset, info.length) == ("file", 8, 16)


def test_there_is_no_default_store_without_a_group():
    with pytest.raises(ValueError, match="init_process_group"):
        default_store()


@pytest.mark.skipif(torch.__version__ < "2.10", reason="torch 2.9 compiles it all the same")
def test_torch_does_not_compile_what_is_marked():
    @never_compiled
    def marked(x):
        return x + 1

    def compiled(function):
        return torch.compile(lambda x: function(x) * 2, backend="eager", fullgraph=True)

    assert compiled(lambda x: x + 1)(torch.ones(1)) == 4
    assert marked(torch.ones(1)) == 2
    with pytest.raises(torch._dynamo.exc.Unsupported):
        compiled(marked)(torch.ones(1))


@pytest.mark.parametrize("name", ["quantile", "nanquantile"])
def test_checks_of_contents_are_no_hindrance_to_fake_tensors(name):
    operator = getattr(torch.ops.aten, name).scalar
    with FakeTensorMode(), checks_hold(operator):
        assert operator(torch.ones(3, 4), 0.5, 1).shape == (3,)
    with FakeTensorMode(), enable_python_dispatcher():
        assert operator(torch.ones(3, 4), 0.5, 1, True).shape == (3, 1)
    with enable_python_dispatcher():
        assert operator(torch.tensor([1.0, 2.0, 4.0]), 0.25) == 1.5
        with pytest.raises(RuntimeError, match="range"):
            operator(torch.ones(3), 1.5)


@pytest.mark.parametrize("layers", [1, 2])
def test_states_of_a_traced_lstm_have_the_shapes_that_were_given(layers):
    lstm = torch.nn.LSTM(4, 4, num_layers=layers)
    given = (torch.zeros(layers, 3, 4),) * 2
    with enable_python_dispatcher():
        _, states = lstm(torch.ones(2, 3, 4, requires_grad=True), given)
    assert [state.shape for state in states] == [(layers, 3, 4)] * 2


def test_a_text_and_a_key_of_a_symbol_are_seen() -> None:
    mode = FakeTensorMode(shape_env=ShapeEnv())
    context = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC], constraint_sizes=[None])
    symbol = mode.from_tensor(torch.empty(6, device="meta"), symbolic_context=context).shape[0]
    lines: list[int] = []
    watch_symbol(symbol, lambda frame: lines.append(frame.f_lineno))
    with mode:
        made = torch.nn.Linear(4, 2)(torch.empty(symbol, 4)).relu()
        here = sys._getframe().f_lineno
        assert f"{made.shape[0]}" == str(symbol)
        with pytest.raises(TypeError):
            hash(made.size(0))
    assert lines == [here + 1, here + 1, here + 3]
