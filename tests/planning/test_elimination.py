"""Elimination against every choice there is, and against an integer program solved by HiGHS."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import Bounds, LinearConstraint, milp

from shardwright.errors import PlanError
from shardwright.planning.elimination import (
    CostFactor,
    elimination_order,
    minimise,
    widest,
)


@st.composite
def problems(draw, variables=5, choices=3):
    """Sizes, and factors of one to three variables, some choices excluded."""
    sizes = draw(st.lists(st.integers(1, choices), min_size=1, max_size=variables))
    scopes = st.sets(st.integers(0, len(sizes) - 1), min_size=1, max_size=3)
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    factors = []
    for scope in draw(st.lists(scopes, max_size=8)):
        shape = [sizes[v] for v in sorted(scope)]
        table = rng.integers(0, 20, shape).astype(float)
        table[rng.random(shape) < draw(st.sampled_from([0.0, 0.1]))] = np.inf
        factors.append(CostFactor(tuple(sorted(scope)), table))
    return sizes, factors


def cost(factors, chosen):
    return sum(float(f.table[tuple(chosen[v] for v in f.scope)]) for f in factors)


@given(problems())
@settings(max_examples=150, deadline=None)
def test_no_choice_is_better(problem):
    sizes, factors = problem
    least = min(cost(factors, c) for c in itertools.product(*map(range, sizes)))
    if np.isinf(least):
        with pytest.raises(PlanError, match="excluded"):
            minimise(sizes, factors)
        return
    chosen, found = minimise(sizes, factors)
    assert found == least == cost(factors, chosen)


def by_integer_program(sizes, factors):
    """One variable a choice of a factor's scope; those of two factors agree on what they share."""
    columns = [list(itertools.product(*(range(sizes[v]) for v in f.scope))) for f in factors]
    starts = np.cumsum([0, *map(len, columns)])
    costs = np.concatenate([f.table.ravel() for f in factors])
    rows, wanted = [], []
    for number, options in enumerate(columns):
        row = np.zeros(starts[-1])
        row[starts[number] : starts[number] + len(options)] = 1
        rows.append(row)
        wanted.append(1)
    for (a, one), (b, two) in itertools.combinations(enumerate(factors), 2):
        for v in set(one.scope) & set(two.scope):
            for value in range(sizes[v]):
                row = np.zeros(starts[-1])
                for start, f, options, sign in (
                    (starts[a], one, columns[a], 1),
                    (starts[b], two, columns[b], -1),
                ):
                    for i, option in enumerate(options):
                        if option[f.scope.index(v)] == value:
                            row[start + i] = sign
                rows.append(row)
                wanted.append(0)
    excluded = np.isinf(costs)
    return milp(
        np.where(excluded, 0.0, costs),
        constraints=LinearConstraint(np.array(rows), wanted, wanted),
        integrality=np.ones(starts[-1]),
        bounds=Bounds(0, np.where(excluded, 0, 1)),
    ).fun


@pytest.mark.parametrize("seed", range(5))
def test_the_least_is_that_of_an_integer_program(seed):
    rng = np.random.default_rng(seed)
    sizes = rng.integers(2, 4, 10).tolist()
    pairs = {tuple(sorted(rng.choice(10, 2, replace=False).tolist())) for _ in range(14)}
    factors = [CostFactor((v,), rng.random(size)) for v, size in enumerate(sizes)]
    factors += [CostFactor(pair, rng.random([sizes[v] for v in pair])) for pair in sorted(pairs)]
    assert minimise(sizes, factors)[1] == pytest.approx(by_integer_program(sizes, factors))


def chain(count, link, end):
    factors = [CostFactor((i, i + 1), link) for i in range(count - 1)]
    return [len(end)] * count, [*factors, CostFactor((0,), end), CostFactor((count - 1,), end)]


def test_equal_layers_are_computed_once():
    rng = np.random.default_rng(0)
    inside, link, end = rng.random((4, 4)), rng.random((4, 4)), rng.random(4)

    def steps(layers):
        """Layers of five nodes, of which three hang on the others."""
        known, factors = {}, []
        for layer in range(layers):
            first = 5 * layer
            factors += [CostFactor((first, first + k), inside) for k in (1, 2, 3)]
            factors += [CostFactor((first + k, first + 4), inside) for k in (1, 2, 3)]
            if layer:
                factors.append(CostFactor((first - 1, first), link))
        sizes = [4] * 5 * layers
        minimise(sizes, [*factors, CostFactor((0,), end)], steps=known)
        return len(known)

    assert steps(40) - steps(20) <= 3 * 20


def test_a_chain_is_its_shortest_path():
    rng = np.random.default_rng(1)
    link, end = rng.random((5, 5)), rng.random(5)
    total = end
    for _ in range(11):
        total = (total[:, None] + link).min(axis=0)
    assert minimise(*chain(12, link, end))[1] == pytest.approx((total + end).min())


def test_the_width_is_told_before_it_is_met():
    sizes = [10] * 9
    scopes = list(itertools.combinations(range(9), 2))
    assert widest(sizes, elimination_order(sizes, scopes)) == 10**9
    factors = [CostFactor(scope, np.zeros((10, 10))) for scope in scopes]
    with pytest.raises(PlanError, match="fewer axes"):
        minimise(sizes, factors)


def test_a_variable_that_nothing_knows_takes_its_first_choice():
    assert minimise([3, 2], [CostFactor((1,), np.array([2.0, 1.0]))]) == ([0, 1], 1.0)
