"""Any sequence of failures, restarts and partial puts: one weight set, or samples that do not count."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from tuner.sidecar.group import Agreement, GroupPut, PutCall, Reported

NAMES = ("a", "b", "c")
START = {"w": 0.0}


class ModelProxy:
    """A proxy: a version, weights, and what the network does to the next calls."""

    def __init__(self) -> None:
        self.version, self.values = 1, dict(START)
        self.reachable = True
        self.loses_answers = False

    def restart(self) -> None:
        self.version, self.values = 1, dict(START)

    def set(self, values: dict[str, float]) -> None:
        self.version, self.values = self.version + 1, dict(values)

    def put(self, call: PutCall) -> int | str:
        """Return the new version, `refused`, or `unanswered`, executed or not."""
        if not self.reachable:
            return "unanswered"
        if call.expected_version != self.version:
            return "refused"
        self.set(dict(call.values))
        return "unanswered" if self.loses_answers else self.version

    @property
    def report(self) -> Reported:
        return Reported(self.version, dict(self.values))


class ModelShell:
    """The shell in a few lines: it does what the agreement and the put say."""

    def __init__(self) -> None:
        self.proxies = {name: ModelProxy() for name in NAMES}
        self.agreement = Agreement(NAMES)
        self.next_value = 1.0

    def read(self) -> bool:
        """Read all proxies; False if one cannot be reached, and nothing is recorded then."""
        if not all(proxy.reachable for proxy in self.proxies.values()):
            return False
        found = {name: proxy.report for name, proxy in self.proxies.items()}
        if self.agreement.differing(found):
            self.agreement.begin_epoch("other weights")
        self.agreement.record_reports(found)
        return True

    def put(self, cut: str | None) -> None:
        """Put a new set; the network to `cut` breaks after the call, before the undoing."""
        if any(self.agreement.reported(name) is None for name in NAMES):
            return
        values = {"w": self.next_value}
        self.next_value += 1
        put = GroupPut(self.agreement, values)
        for name, call in put.calls().items():
            answer = self.proxies[name].put(call)
            if isinstance(answer, int):
                put.applied(name, answer)
            elif answer == "refused":
                put.refused(name)
            else:
                put.unanswered(name)
        if put.complete:
            put.finish_put()
            return
        if cut is not None:
            self.proxies[cut].reachable = False
        if not put.disturbed:
            return
        self.agreement.begin_epoch("undone")
        for name in sorted(put.unknown):
            if self.proxies[name].reachable:
                put.found(name, self.proxies[name].report)
        for name, call in put.undo().items():
            answer = self.proxies[name].put(call)
            if isinstance(answer, int):
                put.undone(name, answer)

    def check(self) -> None:
        """Assert that samples count only while all proxies that can be reached have one set of weights."""
        reachable = {name: proxy for name, proxy in self.proxies.items() if proxy.reachable}
        alike = len({proxy.values["w"] for proxy in reachable.values()}) <= 1
        numbers = {self.agreement.number_of(name, proxy.version) for name, proxy in reachable.items()}
        if not alike:
            assert numbers == {None}, "samples of two weight sets count"
        assert len(numbers - {None}) <= 1, "one number at a time"


EVENT = st.one_of(
    st.tuples(st.just("put"), st.sampled_from([None, *NAMES])),
    st.tuples(st.sampled_from(["restart", "cut", "mend", "deaf", "hears", "operator"]), st.sampled_from(NAMES)),
)


@given(events=st.lists(EVENT, max_size=40))
def test_reachable_proxies_have_one_set_or_their_samples_do_not_count(
    events: Sequence[tuple[str, str | None]],
) -> None:
    shell = ModelShell()
    shell.read()
    for what, name in events:
        if name is not None and what != "put":
            happens(shell.proxies[name], what)
        shell.read()
        if what == "put":
            shell.put(name)
        if all(proxy.reachable for proxy in shell.proxies.values()):
            shell.check()
    for proxy in shell.proxies.values():
        proxy.reachable, proxy.loses_answers = True, False
    assert shell.read()
    shell.put(None)
    assert shell.agreement.in_step, "once all are back, one put brings them to one set"
    shell.check()
    assert {proxy.values["w"] for proxy in shell.proxies.values()} == {shell.next_value - 1}


@given(events=st.lists(EVENT, max_size=40))
def test_a_put_that_fails_leaves_no_reachable_proxy_with_its_weights(
    events: Sequence[tuple[str, str | None]],
) -> None:
    shell = ModelShell()
    shell.read()
    for what, name in events:
        if name is not None and what != "put":
            happens(shell.proxies[name], what)
        if not shell.read() or what != "put":
            continue
        before = {key: dict(proxy.values) for key, proxy in shell.proxies.items()}
        wanted = {"w": shell.next_value}
        shell.put(None)
        now = {key: dict(proxy.values) for key, proxy in shell.proxies.items() if not proxy.loses_answers}
        assert all(values == wanted for values in now.values()) or now == {key: before[key] for key in now}


def happens(proxy: ModelProxy, what: str) -> None:
    match what:
        case "restart":
            proxy.restart()
        case "cut" | "mend":
            proxy.reachable = what == "mend"
        case "deaf" | "hears":
            proxy.loses_answers = what == "deaf"
        case "operator":
            proxy.set({"w": -1.0})
