"""The wanted replicas of a running router, and the prompts that a new replica is warmed with.

Owns the timer of `core.scaling`, which reads books that exist: no request is slower for it. Owns the hot prompts too
(`HotPrompts`). Leaves the metric to `telemetry.metrics`, and starting replicas to what reads it.

Warming is off by default, because nothing else here retains the text of a prompt behind its first bytes. Where it is
on, a few bodies of chats are retained in memory alone, each until a second one begins as it does; then only the
messages that both have in common.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from gorgo.config.model import ScalingConfig
from gorgo.config.router_settings import scaling_limits
from gorgo.core.numeric import try_parse_json
from gorgo.core.router import Router
from gorgo.core.scaling import READ_AT_ONCE, ScalingSignal, WantedReplicas
from gorgo.live.event_loop import Clock
from gorgo.live.logs import log

CHAT = "/v1/chat/completions"
#: A longer body is not retained: to read it takes more than half a millisecond of the event loop.
MOST_BODY_BYTES = 64 * 1024
#: Beginnings that are counted for each that is wanted: the hottest are among them while others come and go.
COUNTED = 4
#: Bytes of all of them: what a small machine does not feel.
MOST_BYTES = 8 * 1024 * 1024
#: Requests after which each count is halved: yesterday's prompts are not hot.
HALVED_AFTER = 4096
#: Fields of a body beside its messages that change the beginning of a prompt.
_PROMPT_FIELDS = ("tools", "chat_template_kwargs")
#: Between two looks for replicas that serve anew, s.
JOIN_INTERVAL_S = 1.0


@dataclass(slots=True)
class _Head:
    """One beginning: how often it came of late, and a body with it until another one shows what is shared."""

    count: int
    body: bytes
    #: The request for what is shared; empty before, and where nothing is.
    prompt: bytes = b""
    compared: bool = False

    @property
    def size(self) -> int:
        return len(self.body) + len(self.prompt)


class HotPrompts:
    """The beginnings that most chats of late share, by the hash of their first tokens (space-saving counters).

    Parameters
    ----------
    wanted:
        Beginnings to return at most.

    Example
    -------
    >>> hot = HotPrompts(1)
    >>> for question in (b"Why?", b"How?"):
    ...     hot.add(CHAT, "m", 7, b'{"messages": [{"role": "system", "content": "Be kind."},'
    ...                           b' {"role": "user", "content": "%b"}]}' % question)
    >>> [(model, json.loads(prompt)["messages"][0]["content"]) for model, prompt in hot.hottest()]
    [('m', 'Be kind.')]
    """

    def __init__(self, wanted: int) -> None:
        self.wanted = wanted
        self._heads: dict[tuple[str | None, int], _Head] = {}
        self._bytes = self._added = 0

    def add(self, route: str, model: str | None, prefix_hash: int, body: bytes) -> None:
        """Count a request."""
        if route != CHAT or len(body) > MOST_BODY_BYTES:
            return
        self._added += 1
        if self._added == HALVED_AFTER:
            self._added = 0
            for head in self._heads.values():
                head.count = (head.count + 1) // 2
        earlier = self._heads.get((model, prefix_hash))
        if earlier is None:
            self._begin((model, prefix_hash), body)
            return
        earlier.count += 1
        if not earlier.compared and body != earlier.body:
            self._bytes -= earlier.size
            earlier.prompt, earlier.body, earlier.compared = shared_prompt(earlier.body, body), b"", True
            self._bytes += earlier.size

    def hottest(self) -> list[tuple[str | None, bytes]]:
        """Return model and body of the most frequent beginnings, without a field `model`."""
        heads = [(key[0], head) for key, head in self._heads.items() if head.prompt]
        heads.sort(key=lambda keyed: -keyed[1].count)
        return [(model, head.prompt) for model, head in heads[: self.wanted]]

    def _begin(self, key: tuple[str | None, int], body: bytes) -> None:
        count = 1
        while self._heads and (len(self._heads) >= COUNTED * self.wanted or self._bytes + len(body) > MOST_BYTES):
            least = min(self._heads, key=lambda each: self._heads[each].count)
            left = self._heads.pop(least)
            self._bytes -= left.size
            # It may have come as often as the one that made room.
            count = left.count + 1
        self._heads[key] = _Head(count, body)
        self._bytes += len(body)

    def check(self) -> None:
        """Assert every bound; for tests."""
        assert self._bytes == sum(head.size for head in self._heads.values()) <= MOST_BYTES
        assert len(self._heads) <= COUNTED * self.wanted


def shared_prompt(first: bytes, second: bytes) -> bytes:
    """Return a request of one token for the messages with which both bodies begin; empty if there are none.

    >>> one = b'{"messages": [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Why?"}]}'
    >>> shared_prompt(one, one.replace(b"Be", b"Do be")), b"Why" in shared_prompt(one, one.replace(b"Why", b"How"))
    (b'', False)
    """
    bodies = try_parse_json(first), try_parse_json(second)
    messages = [body.get("messages") if isinstance(body, dict) else None for body in bodies]
    if not all(isinstance(each, list) for each in messages):
        return b""
    shared: list[Any] = []
    for one, other in zip(*messages, strict=False):
        if one != other or not isinstance(one, dict):
            break
        shared.append(one)
    fields = {name: bodies[0].get(name) for name in _PROMPT_FIELDS if name in bodies[0]}
    if not shared or fields != {name: bodies[1].get(name) for name in _PROMPT_FIELDS if name in bodies[1]}:
        return b""
    if shared[-1].get("role") != "user":
        shared.append({"role": "user", "content": "."})  # templates ask for one
    return json.dumps({**fields, "messages": shared, "max_tokens": 1, "stream": False}).encode()


Warm = Callable[[str, Sequence[tuple[str | None, bytes]]], Awaitable[None]]


class ScalingService:
    """Decides on a timer, and has new replicas warmed.

    Parameters
    ----------
    router, clock:
        Of the process.
    scaling:
        May be replaced.
    """

    def __init__(self, router: Router, clock: Clock, scaling: ScalingConfig) -> None:
        self._router = router
        self._clock = clock
        self._signal: ScalingSignal | None = None
        self._seq = router.samples.last_seq
        #: `None` unless replicas are warmed: each request asks.
        self.hot_prompts: HotPrompts | None = None
        self._healthy: frozenset[str] | None = None
        self._warmed_s: dict[str, float] = {}
        self._scaling = scaling
        self.set_scaling(scaling)

    def set_scaling(self, scaling: ScalingConfig) -> None:
        """Use other settings. What was learned of the traffic stays."""
        self._scaling, limits = scaling, scaling_limits(scaling)
        if limits is None:
            self._signal = None
        elif self._signal is None:
            self._signal = ScalingSignal(limits)
        else:
            self._signal.limits = limits
        if not scaling.warm_prompts:
            self.hot_prompts = None
        elif self.hot_prompts is None or self.hot_prompts.wanted != scaling.warm_prompts:
            self.hot_prompts = HotPrompts(scaling.warm_prompts)

    def wanted(self) -> Sequence[WantedReplicas]:
        """Return the last decisions, by region and model; none without an objective."""
        if self._signal is None:
            return ()
        return sorted(self._signal.wanted.values(), key=lambda one: (one.region, one.model or ""))

    def decide(self) -> None:
        """Decide now."""
        if self._signal is None:
            return
        now, samples = self._clock(), self._router.samples
        served = self._router.view.served_since(self._seq, limit=READ_AT_ONCE)
        self._seq = samples.last_seq
        before = {(one.region, one.model): one.wanted for one in self.wanted()}
        self._signal.decide(self._router.view.scaling_evidence(now=now), served, now=now)
        for one in self.wanted():
            if before.get((one.region, one.model)) != one.wanted:
                log("replicas_wanted", region=one.region, model=one.model, wanted=one.wanted, replicas=one.replicas)

    async def run(self, warm: Warm) -> None:
        """Decide every few seconds, and have replicas that serve anew warmed, until cancelled."""
        decided_s = self._clock()
        async with asyncio.TaskGroup() as tasks:
            while True:
                await asyncio.sleep(JOIN_INTERVAL_S)
                for name in self._joined():
                    assert self.hot_prompts is not None, "without them none is warmed"
                    tasks.create_task(warm(name, self.hot_prompts.hottest()))  # type: ignore[arg-type]
                if self._signal is not None and self._clock() >= decided_s + self._signal.limits.interval_s:
                    decided_s = self._clock()
                    self.decide()

    def _joined(self) -> list[str]:
        """Return the replicas that serve since the last call and are to be warmed; none of those at the start."""
        states = self._router.view.health_states()
        healthy = frozenset(name for name, state in states.items() if state == "healthy")
        before, self._healthy = self._healthy, healthy
        if self.hot_prompts is None or before is None:
            return []
        now = self._clock()
        # One that comes and goes is not warmed each time.
        self._warmed_s = {
            name: warmed_s
            for name, warmed_s in self._warmed_s.items()
            if name in states and now - warmed_s < self._scaling.startup_s
        }
        joined = sorted(healthy - before - self._warmed_s.keys())
        self._warmed_s |= dict.fromkeys(joined, now)
        return joined
