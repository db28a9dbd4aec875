"""The generator of reused prefixes: how much is shared, how far apart, and until when."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from gorgo.apps.datasets.distributions import RandomDraws
from gorgo.apps.datasets.prefix_shapes import SharingShape
from gorgo.apps.datasets.synthetic import MadeRow
from gorgo.apps.datasets.users import quantile

#: Prefixes that may return; the one used longest ago is dropped.
RECENT_MAX = 4096
#: Own parts of the prompts of one prefix vary by so much (sigma).
OWN_NOISE = 0.3
#: Multiples of the golden ratio fill the unit interval evenly: few prefixes have the lengths of the whole shape.
GOLDEN = (5**0.5 - 1) / 2


@dataclass(frozen=True, slots=True)
class _Prefix:
    number: int
    tokens: int
    #: Mean length of what follows it.
    own_tokens: float


def sharing_rows(shape: SharingShape) -> Iterator[MadeRow]:
    """The requests in the order of time."""
    draws, recent, begun, now_s = RandomDraws(shape.seed), list[_Prefix](), 0, 0.0
    first = draws.uniform()
    for number in range(shape.requests):
        now_s += draws.exponential(1 / shape.rate_per_s)
        if number == shape.shift_at:
            recent.clear()
        if not recent or draws.uniform() < shape.new_share:
            begun += 1
            prefix = _new(shape, begun, (first + begun * GOLDEN) % 1)
        else:
            prefix = recent.pop(-1 - min(int(draws.exponential(shape.reuse_distance)), len(recent) - 1))
        recent.append(prefix)
        del recent[:-RECENT_MAX]
        yield _row(shape, draws, prefix, number, now_s)


def _new(shape: SharingShape, number: int, place: float) -> _Prefix:
    tokens = quantile(shape.input_quantiles, place)
    return _Prefix(number, round(tokens * shape.shared_share), tokens * (1 - shape.shared_share))


def _row(shape: SharingShape, draws: RandomDraws, prefix: _Prefix, number: int, now_s: float) -> MadeRow:
    own_tokens = max(1, round(draws.log_normal(prefix.own_tokens, OWN_NOISE)))
    output = draws.log_normal(shape.output_median, shape.output_sigma)
    return MadeRow(
        timestamp_ms=int(1000 * now_s),
        shared=("prefix", prefix.number),
        shared_tokens=prefix.tokens,
        own=("own", number),
        input_tokens=prefix.tokens + own_tokens,
        output_tokens=max(1, min(shape.output_max, round(output))),
    )
