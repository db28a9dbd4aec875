"""Every attack by name: what is done to a proxy and its engine, and when it is over."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from time import monotonic, sleep

from tests.attacks.bodies import CHAT, MIB, SHOWN, HostileBody, hostile_bodies
from tests.attacks.engine import HostileEngine, event_streams, json_answers, metrics_texts
from tests.attacks.target import CONFIG, Target, request

#: Longest time of one attack, and the time of those without an end of their own: several scrapes or reloads.
LIMIT_S, WATCHED_S = 30.0, 2.5
ASK = b'{"model":"m","stream":true,"messages":[{"role":"user","content":"x"}]}'


Run = Callable[[Target, HostileEngine], str]


@dataclass(frozen=True, slots=True)
class Attack:
    """One attack. `prepare` makes what is sent; what it returns runs the attack and says what came of it."""

    kind: str
    name: str
    size: int
    prepare: Callable[[], Run]


def attacks(size: int, *, every: bool = False) -> list[Attack]:
    """Return the attacks of a size; `every` kind of body, or those that the table shows."""
    found = [Attack("nothing", "nothing", 0, lambda: _watch)]
    bodies = hostile_bodies()
    found += [Attack("body", name, size, partial(_post, bodies[name], size)) for name in (bodies if every else SHOWN)]
    found += [Attack("head", name, size, partial(_send, head)) for name, head in _heads(size).items()]
    found += [Attack("events", name, size, partial(_answer, said)) for name, said in event_streams(size).items()]
    found += [Attack("answer", "interim answers", size, lambda: _flood)]
    found += [
        Attack(kind, name, size, partial(_serve, path, said))
        for kind, path, texts in (
            ("metrics", "/metrics", metrics_texts(size)),
            ("models", "/v1/models", json_answers(size)),
        )
        for name, said in texts.items()
    ]
    # A file of 1 MiB is the largest that is read.
    found += [Attack("regions.yaml", name, size, partial(_configure, text)) for name, text in _files(size - 64).items()]
    return found


def _watch(target: Target, engine: HostileEngine) -> str:
    sleep(WATCHED_S)
    return ""


def _post(body: HostileBody, size: int) -> Run:
    return _send(request(body.route, body.of_size(size)))


def _send(data: bytes) -> Run:
    return lambda target, engine: _status(target.send(data, limit_s=LIMIT_S))  # noqa: ARG005 - one shape for all


def _answer(said: bytes) -> Run:
    def run(target: Target, engine: HostileEngine) -> str:
        engine.post = said
        return _status(target.post(CHAT, ASK, limit_s=LIMIT_S))

    return run


def _flood(target: Target, engine: HostileEngine) -> str:
    engine.flood = b"HTTP/1.1 103 Early Hints\r\nlink: a\r\n\r\n" * 500
    try:
        return _status(target.post(CHAT, ASK, limit_s=8.0))
    finally:
        engine.flood = None


def _serve(path: str, said: bytes) -> Run:
    def run(target: Target, engine: HostileEngine) -> str:
        engine.answers[path] = said
        sleep(WATCHED_S)
        del engine.answers[path]
        return ""

    return run


def _configure(text: bytes) -> Run:
    def run(target: Target, engine: HostileEngine) -> str:
        log = target.folder / "router.log"
        before = log.read_bytes().count(b"config_refused")
        (target.folder / "regions.yaml").write_bytes(text)
        end = monotonic() + LIMIT_S
        while log.read_bytes().count(b"config_refused") == before and monotonic() < end:
            sleep(0.1)
        sleep(0.5)
        (target.folder / "regions.yaml").write_text(CONFIG.format(port=engine.port))
        return "refused" if monotonic() < end else "no end"

    return run


def _status(line: bytes) -> str:
    return line.split(b" ")[1].decode() if line.count(b" ") else "no answer"


def _heads(size: int) -> dict[str, bytes]:
    start = b"POST %b HTTP/1.1\r\nhost: g\r\n" % CHAT.encode()
    chunked = start + b"content-type: application/json\r\ntransfer-encoding: chunked\r\nconnection: close\r\n\r\n"
    return {
        "header lines of two bytes": start + b"a:\r\n" * (size // 4) + b"\r\n",
        "one header of all bytes": start + b"a: " + b"x" * size + b"\r\n\r\n",
        "a body in chunks of one byte": chunked + b"1\r\nx\r\n" * (min(size, 8 * MIB) // 6) + b"0\r\n\r\n",
        "requests without a body": (b"GET /health HTTP/1.1\r\nhost: g\r\n\r\n" * (min(size, 2 * MIB) // 35)),
    }


def _files(size: int) -> dict[str, bytes]:
    bomb = b"a0: &a0 [x,x]\n" + b"".join(b"a%d: &a%d [%b]\n" % (n, n, b"*a%d," % (n - 1) * 9) for n in range(1, 40))
    return {
        "aliases of aliases": bomb + b"# " + b"x" * (size - len(bomb)),
        "nested lists": b"[" * size,
        "nested objects": b"a: " + b"{a: " * (size // 4),
        "numbers": b"a: [" + b"1," * (size // 2) + b"1]",
        "an integer of all digits": b"a: " + b"9" * size,
        "unknown keys": b"".join(b"k%07d: 1\n" % n for n in range(size // 12)),
        "variables": b"a: [" + b"${A:-x}," * (size // 8) + b"1]",
        "an open quote": b'a: "' + b"x" * size,
        "anchors": b"a: [" + b"&a 1," * (size // 5) + b"1]",
    }
