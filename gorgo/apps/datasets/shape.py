"""What a made trace looks like: the parameters of the generator, and reading them from TOML."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, fields
from pathlib import Path

from gorgo.errors import TraceError

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


def read_shape(path: Path) -> WorkloadShape:
    """The shape in a TOML file; raises `TraceError` naming the key that is wrong."""
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise TraceError(f"{path}: {error}") from None
    wanted = {field.name: str(field.type) for field in fields(WorkloadShape)}
    if odd := sorted(set(values) ^ set(wanted)):
        state = "unknown" if odd[0] in values else "missing"
        raise TraceError(f"{path}: {odd[0]} is {state}; the keys are {', '.join(wanted)}")
    for name, kind in wanted.items():
        _check_number(path, name, values[name], whole=kind == "int")
    return WorkloadShape(**values)


def _check_number(path: Path, name: str, value: object, *, whole: bool) -> None:
    if isinstance(value, bool) or not isinstance(value, int if whole else int | float) or not 0 <= value < MAX_VALUE:
        raise TraceError(f"{path}: {name} is {value!r}; expected {'a whole' if whole else 'a'} number, at least 0")
