"""The two tables of an overload, and what of the targets was missed."""

# ruff: noqa: T201 - a command says what it found

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tests.overload.live import LiveRun
from tests.overload.obeying import Obedience
from tests.overload.window import Served

#: Of what is offered at 1.3 times capacity, held; of its goodput in requests per second, at 3 times; and how much a
#: normal load may lose, as shares of what is offered.
AT_1_3, AT_3, NORMAL_LOSS = 0.85, 0.9, 0.005
#: Requests of a normal run are few: what one of them weighs is no loss.
ONE = 1.0
#: Obeying clients that get through, and how many of those that come back when told are taken.
THROUGH = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """One load, one way: over HTTP and in virtual time."""

    load: float
    held: bool
    live: LiveRun
    simulated: Served


HEAD = "\n  load  way      offered  good %          good/s         turned away %   TTFT p95 ms     waited  slip ms"


def show_pair(pair: Pair) -> None:
    """A row under `HEAD`; simulated figures in brackets."""
    seen, virtual = pair.live.served, pair.simulated
    cells = (
        f"{seen.good * 100:5.1f} ({virtual.good * 100:5.1f})",
        f"{seen.per_s:5.2f} ({virtual.per_s:5.2f})",
        f"{seen.rejected * 100:5.1f} ({virtual.rejected * 100:5.1f})",
        f"{_ms(seen.ttft_ms_p95):>5} ({_ms(virtual.ttft_ms_p95):>5})",
    )
    print(
        f"{pair.load:>6g}  {'held' if pair.held else 'at once':<7}  {seen.offered:>7}  "
        + "  ".join(f"{cell:<14}" for cell in cells)
        + f"  {pair.live.most_held:>5}  {pair.live.slip_ms_p95:>7.0f}",
        flush=True,
    )


def show_obedience(load: float, found: Obedience) -> None:
    """What obeying clients met."""
    print(f"\nclients that obey Retry-After, at {load:g} times capacity: {found.offered} requests")
    print(f"  through in the end {found.through:.1%}, at the first try {found.first_try:.1%}")
    print(
        f"  turned away {found.turned_away}; tries of those {_two(found.tries_mean)} (mean), {found.tries_most} (most)"
    )
    if found.taken_when_told is not None:
        print(f"  of those that came back when told {found.taken_when_told:.1%} were taken")
    print(f"  told to stay away {_two(found.told_s_p50)} s, nobody waited after {_two(found.room_s_p50)} s (medians)")


def missed(pairs: Sequence[Pair], obeyed: Obedience | None, *, queue_max_requests: int) -> list[str]:
    """Each target that was not met, as a sentence; what was not measured is not judged."""
    found = {(pair.load, pair.held): pair.live for pair in pairs}
    wrong = [*_shares(found), *_normal(found)]
    wrong += [
        f"at {pair.load:g} {pair.live.most_held} waited, {queue_max_requests} at most"
        for pair in pairs
        if pair.live.most_held > queue_max_requests
    ]
    return wrong if obeyed is None else [*wrong, *_obeyed(obeyed)]


def _shares(found: Mapping[tuple[float, bool], LiveRun]) -> list[str]:
    above, far = found.get((1.3, True)), found.get((3.0, True))
    wrong = []
    if above is not None and above.served.good < AT_1_3:
        wrong.append(f"at 1.3 held {above.served.good:.1%} were served well, {AT_1_3:.0%} at least")
    if above is not None and far is not None and far.served.per_s < AT_3 * above.served.per_s:
        wrong.append(f"at 3 {far.served.per_s:.2f} a second were served well, at 1.3 {above.served.per_s:.2f}")
    return wrong


def _normal(found: Mapping[tuple[float, bool], LiveRun]) -> list[str]:
    plain, held = found.get((0.7, False)), found.get((0.7, True))
    if plain is None or held is None:
        return []
    lost = plain.served.good - held.served.good
    if lost * held.served.offered > max(ONE, NORMAL_LOSS * held.served.offered):
        return [f"at 0.7 holding loses {lost:.1%} of what is served well, {NORMAL_LOSS:.1%} at most"]
    return []


def _obeyed(obeyed: Obedience) -> list[str]:
    wrong = []
    if obeyed.untold:
        wrong.append(f"{obeyed.untold} refusals without a Retry-After")
    if obeyed.through < THROUGH:
        wrong.append(f"{obeyed.through:.1%} of obeying clients got through, {THROUGH:.0%} at least")
    return wrong


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}"


def _two(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"
