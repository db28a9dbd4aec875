"""A campaign's state as a record, and as JSON.

Left out on purpose: windows, unfinished blocks, versions of weights, puts without an answer. A resumed campaign puts
its arm again under a new version, so that no earlier request counts twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from gorgo.errors import GorgoError, TunerError
from tuner.objective import WindowStats

Phase = Literal["new", "warming", "comparing", "frozen", "stopped"]

FORMAT = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class CampaignState:
    """What a restarted process needs; `cursor` is the proxy's boot id and the last sample's number."""

    mode: str
    phase: Phase
    stop_reason: str | None
    start: Mapping[str, float]
    incumbent: Mapping[str, float]
    audited: bool
    saturated_since: float | None
    number: int
    anchor: float | None
    reference: WindowStats | None
    started_s: float | None
    opened_s: float | None
    cursor: tuple[str | None, int]
    rng: Mapping[str, Any]
    optimizer: Mapping[str, Any]
    trial: Mapping[str, Any] | None

    def as_json(self) -> dict[str, Any]:
        return {"format": FORMAT} | asdict(self) | {"cursor": list(self.cursor)}

    @classmethod
    def from_json(cls, state: Mapping[str, Any], *, mode: str) -> CampaignState:
        """Return the state; raise `TunerError` for another format, another mode or an unknown phase."""
        if state.get("format") != FORMAT or state.get("mode") != mode:
            found = f"format {state.get('format')!r}, mode {state.get('mode')!r}"
            raise TunerError(f"saved campaign has {found}; expected format {FORMAT}, mode {mode!r}")
        if state["phase"] not in get_args(Phase):
            raise TunerError(
                f"saved campaign is in phase {state['phase']!r}; expected one of {', '.join(get_args(Phase))}"
            )
        boot_id, last_seq = state["cursor"][0], int(state["cursor"][1])
        plain = {name: state[name] for name in cls.__slots__}
        typed = {
            "start": {str(name): float(value) for name, value in state["start"].items()},
            "audited": bool(state["audited"]),
            "number": int(state["number"]),
            "reference": None if state["reference"] is None else WindowStats(**state["reference"]),
            "cursor": (boot_id, last_seq),
        }
        return cls(**plain | typed)


@contextmanager
def damage_as_error() -> Iterator[None]:
    """Raise `TunerError` for any failure on a damaged state."""
    try:
        yield
    except GorgoError:
        raise
    except (LookupError, TypeError, AttributeError, ValueError, OverflowError) as error:
        raise TunerError(f"saved campaign is damaged: {error!r}") from error
