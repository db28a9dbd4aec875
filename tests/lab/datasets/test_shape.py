"""Each distribution from a known uniform number, and the bytes of every kind of shape."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace

import pytest

from gorgo.lab.datasets import PoissonShape, read_shape, shapes
from gorgo.lab.datasets.catalogue import generate_trace
from gorgo.lab.datasets.shape import RandomDraws


def drawing(*uniform: float) -> RandomDraws:
    """RandomDraws that see these numbers in turn."""
    draws, numbers = RandomDraws(0), iter(uniform)
    draws.uniform = lambda: next(numbers)
    return draws


def test_the_same_seed_draws_the_same_and_another_one_something_else() -> None:
    first, again, other = (RandomDraws(seed) for seed in (5, 5, 6))
    assert [first.uniform() for _ in range(3)] == [again.uniform() for _ in range(3)]
    assert RandomDraws(5).uniform() != other.uniform()


def test_an_exponential_is_its_mean_times_the_logarithm() -> None:
    assert drawing(0.0).exponential(3.0) == 0.0
    # Half of all are below ln 2 of the mean.
    assert drawing(0.5).exponential(3.0) == pytest.approx(3.0 * 0.693147)


@pytest.mark.parametrize(
    ("first", "second", "normal"),
    # A quarter turn is 0, half a turn the opposite: sqrt(2 ln 2) is 1.177410.
    [(0.5, 0.0, 1.177410), (0.5, 0.5, -1.177410), (0.5, 0.25, 0.0), (0.0, 0.3, 0.0)],
)
def test_a_log_normal_is_its_median_times_e_to_a_normal(first: float, second: float, normal: float) -> None:
    expected = 10.0 * 2.718281828 ** (0.5 * normal)
    assert drawing(first, second).log_normal(10.0, 0.5) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("mean", "uniform", "count"),
    # Of a mean of 4 a quarter of all ends with each: 1 up to 1/4, 2 up to 7/16, 3 up to 37/64.
    [(4.0, 0.0, 1), (4.0, 0.24, 1), (4.0, 0.26, 2), (4.0, 0.43, 2), (4.0, 0.44, 3), (4.0, 0.57, 3), (4.0, 0.58, 4)],
)
def test_a_geometric_ends_with_each_turn_with_the_same_chance(mean: float, uniform: float, count: int) -> None:
    assert drawing(uniform).geometric(mean) == count


@pytest.mark.parametrize("mean", [1.0, 0.5])
def test_a_geometric_of_one_at_most_is_one(mean: float) -> None:
    assert drawing(0.999).geometric(mean) == 1


@pytest.mark.parametrize(
    ("uniform", "rank"),
    # Of three, 6/11, 3/11 and 2/11.
    [(0.0, 0), (0.545, 0), (0.546, 1), (0.818, 1), (0.819, 2), (0.999, 2), (1.0, 2)],
)
def test_a_rank_is_in_proportion_to_one_over_it(uniform: float, rank: int) -> None:
    assert drawing(uniform).rank(3) == rank


@pytest.mark.parametrize(("uniform", "found"), [(0.0, 0), (0.249, 0), (0.25, 1), (0.999, 3), (1.0, 3)])
def test_numbers_below_a_count_are_equally_likely(uniform: float, found: int) -> None:
    assert drawing(uniform).below(4) == found


@pytest.mark.parametrize(
    ("uniform", "mixed"),
    [([0.0, 0.0, 0.0], "bcda"), ([0.9, 0.9, 0.9], "abcd"), ([0.3, 0.0, 0.9], "cdab")],
)
def test_items_are_exchanged_from_the_last_to_the_second(uniform: Sequence[float], mixed: str) -> None:
    items = list("abcd")
    assert "".join(drawing(*uniform).shuffled(items)) == mixed
    assert items == list("abcd")


def test_a_shape_gives_the_same_bytes_on_every_machine_and_every_python() -> None:
    """Shipped traces are held to their shapes elsewhere; of this kind none is shipped."""
    shape = read_shape(shapes()["wildchat-like"])
    assert isinstance(shape, PoissonShape)
    made = generate_trace(replace(shape, duration_s=120.0))
    assert hashlib.sha256(made).hexdigest()[:16] == "f416e89673678ec2"
