import pytest
import torch
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    CyclicLR,
    ExponentialLR,
    LambdaLR,
    LinearLR,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
)

from shardwright.errors import InputError
from shardwright.ops.optimizers import RECORDED
from shardwright.tracing import Rate
from shardwright.tracing.effects import hyper_parameters
from shardwright.tracing.rates import Rates

MAKERS = {
    "exponential": lambda optimizer: ExponentialLR(optimizer, 0.9),
    "lambda": lambda optimizer: LambdaLR(optimizer, [lambda step: 1 / (step + 1)] * 2),
    "one cycle": lambda optimizer: OneCycleLR(
        optimizer, max_lr=0.5, total_steps=20, cycle_momentum=False
    ),
    "one momentum": lambda optimizer: OneCycleLR(
        optimizer, max_lr=0.5, total_steps=20, base_momentum=0.9, max_momentum=0.9
    ),
    "warm up": lambda optimizer: SequentialLR(
        optimizer, [LinearLR(optimizer, 0.1, total_iters=3), ExponentialLR(optimizer, 0.8)], [3]
    ),
}


def make_optimizer(cls: type[Optimizer] = SGD) -> Optimizer:
    groups = [{"params": [torch.nn.Parameter(torch.ones(1))], "lr": lr} for lr in (0.1, 0.2)]
    return cls(groups)


def rates_of(optimizer: Optimizer) -> list[Rate]:
    marker = RECORDED[type(optimizer)](optimizer.param_groups[0])
    return [
        Rate(
            name, optimizer, index, marker, hyper_parameters(marker, optimizer.param_groups[index])
        )
        for index, name in enumerate(("lr", "lr_1"))
    ]


def by_hand(maker, steps: int) -> list[tuple[float, float]]:
    optimizer = make_optimizer()
    scheduler = maker(optimizer)
    found = []
    for _ in range(steps):
        found.append(tuple(group["lr"] for group in optimizer.param_groups))
        optimizer.step()
        scheduler.step()
    return found


def take(rates: Rates, steps: int) -> list[tuple[float, float]]:
    found = []
    for _ in range(steps):
        inputs = rates.inputs()
        assert all(rate.dtype == torch.float64 and not rate.shape for rate in inputs.values())
        found.append((inputs["lr"].item(), inputs["lr_1"].item()))
        rates.advance()
    return found


@pytest.mark.parametrize("maker", MAKERS.values(), ids=MAKERS.keys())
def test_rates_are_those_of_a_loop_written_by_hand(maker) -> None:
    optimizer = make_optimizer()
    scheduler = maker(optimizer)
    assert take(Rates(rates_of(optimizer), scheduler), 12) == by_hand(maker, 12)


@pytest.mark.parametrize("maker", MAKERS.values(), ids=MAKERS.keys())
def test_rates_go_on_after_a_pause(maker) -> None:
    optimizer = make_optimizer()
    scheduler = maker(optimizer)
    before = Rates(rates_of(optimizer), scheduler)
    first = take(before, 5)
    again = make_optimizer()
    scheduler = maker(again)
    after = Rates(rates_of(again), scheduler)
    after.load_state_dict(before.state_dict())
    assert first + take(after, 7) == by_hand(maker, 12)


def test_a_function_of_the_step() -> None:
    optimizer = make_optimizer()
    rates = Rates(rates_of(optimizer), lambda step: 0.5**step)
    assert take(rates, 3) == [(0.1, 0.2), (0.05, 0.1), (0.025, 0.05)]
    after = Rates(rates_of(make_optimizer()), lambda step: 0.5**step)
    after.load_state_dict(rates.state_dict())
    assert take(after, 1) == [(0.0125, 0.025)]


def test_without_a_scheduler_rates_stay() -> None:
    assert take(Rates(rates_of(make_optimizer())), 2) == [(0.1, 0.2)] * 2


def test_a_scheduler_that_the_step_calls_steps_once() -> None:
    optimizer = make_optimizer()
    scheduler = ExponentialLR(optimizer, 0.5)
    rates = Rates(rates_of(optimizer), scheduler, called=[scheduler])
    assert take(rates, 2)[1] == (0.05, 0.1)


def test_what_is_no_scheduler_of_the_run() -> None:
    optimizer = make_optimizer()
    with pytest.raises(InputError, match="ReduceLROnPlateau follows a number"):
        Rates(rates_of(optimizer), ReduceLROnPlateau(optimizer))
    with pytest.raises(InputError, match="an optimizer that the step does not use"):
        Rates(rates_of(optimizer), ExponentialLR(make_optimizer(), 0.5))
    with pytest.raises(InputError, match="scheduler= is a float"):
        Rates(rates_of(optimizer), 0.5)
    other = Rates(rates_of(optimizer))
    with pytest.raises(InputError, match="written with 1 schedulers, this run has 0"):
        other.load_state_dict(
            Rates(rates_of(optimizer), ExponentialLR(optimizer, 0.5)).state_dict()
        )


def cyclic(optimizer: Optimizer) -> CyclicLR:
    return CyclicLR(optimizer, 0.1, 0.5, step_size_up=3)


def one_cycle(optimizer: Optimizer) -> OneCycleLR:
    return OneCycleLR(optimizer, 0.5, total_steps=20)


def after_a_warm_up(optimizer: Optimizer) -> SequentialLR:
    return SequentialLR(optimizer, [ExponentialLR(optimizer, 0.9), cyclic(optimizer)], [3])


@pytest.mark.parametrize(
    ("cls", "maker", "message"),
    [
        (SGD, one_cycle, r"OneCycleLR moves momentum of parameter group 0 between 0.85 and 0.95"),
        (SGD, cyclic, r"CyclicLR moves momentum of parameter group 0 between 0.8 and 0.9"),
        (Adam, cyclic, r"moves betas\[0\] of parameter group 0 between 0.8 and 0.9"),
        (AdamW, one_cycle, r"betas\[0\] .* make the scheduler with cycle_momentum=False"),
        (AdamW, after_a_warm_up, r"the CyclicLR moves betas\[0\]"),
        (SGD, lambda optimizer: ChainedScheduler([cyclic(optimizer)]), r"CyclicLR moves momentum"),
    ],
)
def test_a_scheduler_that_cycles_momentum(cls, maker, message) -> None:
    optimizer = make_optimizer(cls)
    scheduler = maker(optimizer)
    with pytest.raises(InputError, match=message):
        Rates(rates_of(optimizer), scheduler)
    with pytest.raises(InputError, match=message):
        Rates(rates_of(optimizer), called=[scheduler])


@pytest.mark.parametrize(
    ("cls", "change", "message"),
    [
        (
            AdamW,
            {"weight_decay": 0.5},
            "'weight_decay' of parameter group 1 of the AdamW is 0.5, .* captured with 0.01",
        ),
        (Adam, {"betas": (0.8, 0.999)}, r"'betas' .* is \[0.8, 0.999\], .* with \[0.9, 0.999\]"),
        (AdamW, {"eps": 1e-4}, "'eps' .* is 0.0001, .* captured with 1e-08"),
        (SGD, {"momentum": 0.5}, "'momentum' .* SGD is 0.5, .* captured with 0"),
        (SGD, {"nesterov": True}, "'nesterov' .* is True"),
    ],
)
def test_other_hyper_parameters_may_not_change(cls, change, message) -> None:
    optimizer = make_optimizer(cls)
    rates = Rates(rates_of(optimizer))
    take(rates, 2)
    optimizer.param_groups[1] |= change
    with pytest.raises(InputError, match=f"before step 3: {message}"):
        rates.inputs()
    after = Rates(rates_of(make_optimizer(cls)))
    after.load_state_dict(rates.state_dict())
    with pytest.raises(InputError, match=f"before step 3: {message}"):
        after.inputs()
