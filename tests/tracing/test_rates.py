import pytest
import torch
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import (
    ExponentialLR,
    LambdaLR,
    LinearLR,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
)

from shardwright.errors import InputError
from shardwright.tracing import Rate
from shardwright.tracing.rates import Rates

MAKERS = {
    "exponential": lambda optimizer: ExponentialLR(optimizer, 0.9),
    "lambda": lambda optimizer: LambdaLR(optimizer, [lambda step: 1 / (step + 1)] * 2),
    "one cycle": lambda optimizer: OneCycleLR(optimizer, max_lr=0.5, total_steps=20),
    "warm up": lambda optimizer: SequentialLR(
        optimizer, [LinearLR(optimizer, 0.1, total_iters=3), ExponentialLR(optimizer, 0.8)], [3]
    ),
}


def make_optimizer() -> SGD:
    groups = [{"params": [torch.nn.Parameter(torch.ones(1))], "lr": lr} for lr in (0.1, 0.2)]
    return SGD(groups)


def rates_of(optimizer: Optimizer) -> list[Rate]:
    return [Rate("lr", optimizer, 0), Rate("lr_1", optimizer, 1)]


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
    assert take(Rates(rates_of(optimizer), maker(optimizer)), 12) == by_hand(maker, 12)


@pytest.mark.parametrize("maker", MAKERS.values(), ids=MAKERS.keys())
def test_rates_go_on_after_a_pause(maker) -> None:
    optimizer = make_optimizer()
    before = Rates(rates_of(optimizer), maker(optimizer))
    first = take(before, 5)
    again = make_optimizer()
    after = Rates(rates_of(again), maker(again))
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
