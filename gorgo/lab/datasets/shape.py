"""What a made trace looks like: the parameters of the generators, and reading them from TOML.

Owns the shapes of three generators, the reading of all shapes, and the random distributions that generators draw from
(`RandomDraws`). Leaves the shapes by what prompts share to `prefix_shapes`, and the requests to the generators.

The key `kind` says which generator a file is for: `conversations` (also where it is missing), `users` or `poisson`, or
one of those in `prefix_shapes`: `groups`, `sharing`, `rag`, `herd` or `agents`. The optional key `block_tokens` of
every kind is the size of a prompt's blocks in simulations; files have 512.
"""

from __future__ import annotations

import math
import random
import tomllib
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, fields
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

from gorgo.errors import TraceError
from gorgo.lab.datasets.prefix_shapes import AgentsShape, GroupsShape, HerdShape, Quantiles, RagShape, SharingShape
from gorgo.lab.traces import BLOCK_TOKENS

#: Two dozen parameters are 1 kB. The parser takes time with the square of a dotted key's parts.
MAX_BYTES = 8192
#: No sensible parameter is larger.
MAX_VALUE = 1e12


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadShape:
    """A chat workload: some users in long conversations, others who ask once.

    `*_median` and `*_sigma` are those of a log-normal distribution, lengths in tokens.

    Parameters
    ----------
    seed, duration_s:
        Chance, and when the last request may come.
    applications, application_tokens, application_share:
        Each prompt begins with a system prompt of 1x to 2x `application_tokens`. For so large a share of the users it
        is that of one of so many applications, the n-th chosen in proportion to 1/n; for the others it is their own.
    conversations, ramp_s:
        So many conversations run side by side; they start evenly over the first `ramp_s`.
    turns_mean:
        Requests of a conversation in this trace (geometric); then another takes its place.
    think_s_min, think_s_mean:
        Time between two requests of a conversation: the least, and the mean of what comes on top (exponential).
    history_*:
        Length of a conversation before its first request here: it began before the trace does.
    turn_*:
        New text of each turn besides the answer to the last one.
    output_*:
        Output lengths, capped at `output_max`.
    single_per_s, single_*:
        Rate of requests that are no part of a conversation, and their lengths.
    input_max:
        No prompt is longer; a conversation that reaches it ends.
    """

    seed: int
    duration_s: float
    applications: int
    application_tokens: int
    application_share: float
    conversations: int
    ramp_s: float
    turns_mean: float
    think_s_min: float
    think_s_mean: float
    history_median: float
    history_sigma: float
    turn_median: float
    turn_sigma: float
    output_median: float
    output_sigma: float
    output_max: int
    single_per_s: float
    single_median: float
    single_sigma: float
    input_max: int
    block_tokens: int = BLOCK_TOKENS


@dataclass(frozen=True, slots=True, kw_only=True)
class UsersShape:
    """A window out of a service with lasting users, long prompts and much reuse (`users.py` says how it is made).

    `*_median` and `*_sigma` are those of a log-normal distribution, lengths in tokens.

    Parameters
    ----------
    seed, duration_s:
        Chance, and the length of the window.
    users, requests:
        How many there are, exactly, with every seed.
    requests_sigma:
        How unequal users are: sigma of a user's requests beyond the first.
    one_shot_share, one_shot_own:
        So large a share of the requests comes from users who hold no conversation; so large a part of each of their
        prompts is new, the rest is their own unchanging beginning.
    conversation_requests:
        Requests of a conversation in the window (mean, geometric); then its user goes on with another one.
    retry_budget_ratio:
        Share of a conversation's requests that ask the last prompt again.
    input_quantiles, input_max:
        Prompt lengths over all requests, as points [share, tokens] joined by lines; and the longest prompt there
        is: a conversation that reaches it stays there.
    system_*:
        System prompt of a user: all their conversations begin with it.
    applications, application_tokens, application_share:
        For so large a share of the users who converse it is that of one of so many applications, 1x to 2x
        `application_tokens` long, the n-th chosen in proportion to 1/n.
    turn_*:
        What a turn adds, on average over a conversation: the answer before it and the new question.
    answer_share, output_max:
        The answer's part of that; no answer is longer than the second.
    pause_s_min, pause_s_median, pause_sigma:
        Time between two requests of a user: the least, and the typical time on top, which differs between users. It is
        shortened for users who would not be done within the window.
    swing, waves:
        The load rises and falls by about this share of itself, so many times (a whole number) in the window.
    """

    seed: int
    duration_s: float
    users: int
    requests: int
    requests_sigma: float
    one_shot_share: float
    one_shot_own: float
    conversation_requests: float
    retry_budget_ratio: float
    input_quantiles: Quantiles
    input_max: int
    system_median: float
    system_sigma: float
    applications: int
    application_tokens: int
    application_share: float
    turn_median: float
    turn_sigma: float
    answer_share: float
    output_max: int
    pause_s_min: float
    pause_s_median: float
    pause_sigma: float
    swing: float
    waves: int
    block_tokens: int = BLOCK_TOKENS

    def __post_init__(self) -> None:
        if not 0 < self.users <= self.requests:
            raise TraceError(f"{self.users} users send {self.requests} requests; expected at least 1 each")
        if not self.swing < 1:
            raise TraceError(f"swing is {self.swing}; expected less than 1: time does not run backwards")
        if not self.applications > 0:
            raise TraceError("applications is 0; expected at least 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class PoissonShape:
    """Poisson arrivals of short prompts with little reuse.

    Parameters
    ----------
    seed, duration_s, rate_per_s:
        Chance, the length of the window, and the mean rate.
    input_median, input_sigma, input_max:
        First prompts (log-normal, capped), tokens.
    continue_share, continue_after_s:
        Share of the requests that go on with the conversation that has waited longest, if that is at least so long.
    turn_*:
        What such a request adds.
    output_*:
        Output lengths, capped at `output_max`.
    """

    seed: int
    duration_s: float
    rate_per_s: float
    input_median: float
    input_sigma: float
    input_max: int
    continue_share: float
    continue_after_s: float
    turn_median: float
    turn_sigma: float
    output_median: float
    output_sigma: float
    output_max: int
    block_tokens: int = BLOCK_TOKENS


Shape = WorkloadShape | UsersShape | PoissonShape | GroupsShape | SharingShape | RagShape | HerdShape | AgentsShape

_KINDS: dict[str, type[Shape]] = {
    "conversations": WorkloadShape,
    "users": UsersShape,
    "poisson": PoissonShape,
    "groups": GroupsShape,
    "sharing": SharingShape,
    "rag": RagShape,
    "herd": HerdShape,
    "agents": AgentsShape,
}


def read_shape(path: Path) -> Shape:
    """The shape in a TOML file; raises `TraceError` naming the key that is wrong."""
    try:
        with path.open("rb") as file:
            text = file.read(MAX_BYTES + 1)
        if len(text) > MAX_BYTES:
            raise TraceError(f"{path}: larger than {MAX_BYTES:,} bytes; expected a shape")
        values = tomllib.loads(text.decode())
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror or error}") from None
    except ValueError as error:
        raise TraceError(f"{path}: {error}") from None
    except RecursionError:
        raise TraceError(f"{path}: lists or tables nested too deeply; expected a shape") from None
    kind = values.pop("kind", "conversations")
    if not isinstance(kind, str) or kind not in _KINDS:
        raise TraceError(f"{path}: kind is {kind!r}; expected one of {', '.join(_KINDS)}")
    try:
        return _KINDS[kind](**_checked({**_defaults(_KINDS[kind]), **values}, _KINDS[kind]))
    except TraceError as error:
        raise TraceError(f"{path}: {error}") from None


def _defaults(kind: type[Shape]) -> dict[str, Any]:
    return {field.name: field.default for field in fields(kind) if field.default is not MISSING}


def _checked(values: dict[str, Any], kind: type[Shape]) -> dict[str, Any]:
    wanted = {field.name: str(field.type) for field in fields(kind)}
    if odd := sorted(set(values) ^ set(wanted)):
        state = "unknown" if odd[0] in values else "missing"
        raise TraceError(f"{odd[0]} is {state}; the keys are {', '.join(wanted)}")
    if values["block_tokens"] == 0:
        raise TraceError("block_tokens is 0; expected at least 1")
    return {name: _value(name, values[name], type_name) for name, type_name in wanted.items()}


def _value(name: str, value: Any, type_name: str) -> Any:
    if type_name == "Quantiles":
        return _quantiles(name, value)
    if not _is_number(value, whole=type_name == "int"):
        whole = "a whole" if type_name == "int" else "a"
        raise TraceError(f"{name} is {value!r}; expected {whole} number, at least 0")
    return value


def _is_number(value: object, *, whole: bool = False) -> bool:
    kinds = int if whole else int | float
    return isinstance(value, kinds) and not isinstance(value, bool) and 0 <= value < MAX_VALUE


def _quantiles(name: str, value: Any) -> Quantiles:
    is_list = isinstance(value, list) and all(isinstance(point, list) and len(point) == 2 for point in value)
    points = tuple((share, tokens) for share, tokens in value) if is_list else ()
    good = len(points) >= 2 and all(_is_number(number) for point in points for number in point)
    if not good or (points[0][0], points[-1][0]) != (0, 1) or not _rising(points):
        raise TraceError(f"{name} is {value!r}; expected points [share, tokens], both rising, from share 0 to 1")
    return points


def _rising(points: Quantiles) -> bool:
    return all(low[0] < high[0] and low[1] <= high[1] for low, high in pairwise(points))


# Random distributions of the generators, from uniform numbers.
#
# Only `random.Random.random` is used, whose sequence Python guarantees, and values are rounded to whole numbers before
# they are written: a shape gives the same bytes on every machine and Python.


T = TypeVar("T")


class RandomDraws:
    """Draws of one seed, in one order."""

    def __init__(self, seed: int) -> None:
        self.uniform = random.Random(seed).random

    def exponential(self, mean: float) -> float:
        return -mean * math.log(1 - self.uniform())

    def log_normal(self, median: float, sigma: float) -> float:
        normal = math.sqrt(-2 * math.log(1 - self.uniform())) * math.cos(2 * math.pi * self.uniform())
        return median * math.exp(sigma * normal)

    def geometric(self, mean: float) -> int:
        """At least 1."""
        return 1 + int(math.log(1 - self.uniform()) / math.log(1 - 1 / mean)) if mean > 1 else 1

    def rank(self, count: int) -> int:
        """0 to count - 1, the n-th in proportion to 1/n."""
        target = self.uniform() * sum(1 / n for n in range(1, count + 1))
        for rank in range(count):
            target -= 1 / (rank + 1)
            if target < 0:
                return rank
        return count - 1

    def below(self, count: int) -> int:
        """0 to count - 1, each as likely."""
        return min(int(self.uniform() * count), count - 1)

    def shuffled(self, items: Sequence[T]) -> list[T]:
        """The items in any order, each as likely."""
        mixed = list(items)
        for last in range(len(mixed) - 1, 0, -1):
            other = self.below(last + 1)
            mixed[last], mixed[other] = mixed[other], mixed[last]
        return mixed
