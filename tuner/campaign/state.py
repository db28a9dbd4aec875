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
from tuner.saved_fields import MAX_TIME_S, SavedFields

Phase = Literal["new", "warming", "comparing", "frozen", "stopped"]

FORMAT = 1
#: Of p95 E2E in a saved state, a logarithm; states of versions without it have lost nothing yet.
MAX_LOSS = 10.0
_CURSOR = ("boot_id", "last_seq")


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
    e2e_lost: float
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
        """Return the state; raise `TunerError` for another format or mode, and for a wrong value."""
        if state.get("format") != FORMAT or state.get("mode") != mode:
            found = f"format {state.get('format')!r}, mode {state.get('mode')!r}"
            raise TunerError(f"saved campaign has {found}; expected format {FORMAT}, mode {mode!r}")
        if state["phase"] not in get_args(Phase):
            raise TunerError(
                f"saved campaign is in phase {state['phase']!r}; expected one of {', '.join(get_args(Phase))}"
            )
        fields = SavedFields(state, "saved campaign")
        return cls(
            mode=mode,
            phase=state["phase"],
            stop_reason=fields.short_text("stop_reason"),
            start=fields.numbers("start"),
            incumbent=fields.numbers("incumbent"),
            audited=fields.flag("audited"),
            saturated_since=fields.optional("saturated_since", least=0, most=MAX_TIME_S),
            number=fields.count("number"),
            anchor=fields.optional("anchor", least=0),
            e2e_lost=fields.number("e2e_lost", least=0, most=MAX_LOSS) if "e2e_lost" in state else 0.0,
            reference=None if state["reference"] is None else WindowStats.of(fields.inner("reference")),
            started_s=fields.optional("started_s", least=0, most=MAX_TIME_S),
            opened_s=fields.optional("opened_s", least=0, most=MAX_TIME_S),
            cursor=_cursor(fields),
            rng=_rng(fields),
            optimizer=state["optimizer"],
            trial=state["trial"],
        )


def _cursor(fields: SavedFields) -> tuple[str | None, int]:
    found = fields.items("cursor", most=2)
    if len(found) != len(_CURSOR):
        raise fields.wrong("cursor", "a boot id and a number")
    cursor = SavedFields(dict(zip(_CURSOR, found, strict=True)), "saved campaign.cursor")
    return cursor.short_text(_CURSOR[0]), cursor.count(_CURSOR[1], most=2**63)


def _rng(fields: SavedFields) -> Mapping[str, Any]:
    fields.inner("rng")  # an object; `generator_of` reads it
    return fields.value("rng")  # type: ignore[return-value] # as just checked


@contextmanager
def damage_as_error() -> Iterator[None]:
    """Raise `TunerError` for any failure on a damaged state."""
    try:
        yield
    except GorgoError:
        raise
    except (LookupError, TypeError, AttributeError, ValueError, OverflowError) as error:
        raise TunerError(f"saved campaign is damaged: {error!r}") from error
