"""Streams split anywhere and mutated anyhow: what reads them on the way changes no byte, and holds a bounded part."""

from __future__ import annotations

from random import Random

from gorgo.core.stream import FirstTokenDetector, StreamState, UsageEventFilter, UsageReader, read_usage
from tests.proxy.fakes import DONE, ROLE, USAGE, delta
from tests.proxy.fuzz.mutate import EXAMPLES, mutated

ROUTES = ("/v1/chat/completions", "/v1/completions", "/generate", "/v1/responses", "/v1/messages")
GOOD = ROLE + b": ping\n\n" + delta("Hé\n\ud7ff") + delta('"usage"') + b"event: x\r\ndata: {}\r\n\r\n" + DONE
#: The filter's and the tail's own bounds are 64 KiB or less; none may hold more than a few of them.
HELD_BYTES = 1 << 18


def pieces(chance: Random, text: bytes) -> list[bytes]:
    cuts = sorted(chance.randrange(len(text) + 1) for _ in range(chance.randrange(12)))
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


def filtered(parts: list[bytes]) -> bytes:
    usage_filter = UsageEventFilter()
    return b"".join(map(usage_filter.feed, parts)) + usage_filter.flush()


def test_filter_takes_out_the_usage_event_alone_wherever_the_stream_is_split() -> None:
    stream = GOOD.removesuffix(DONE) + USAGE + DONE
    for at in range(len(stream) + 1):
        assert filtered([stream[:at], stream[at:]]) == GOOD


def test_filter_changes_nothing_in_a_stream_without_a_usage_event() -> None:
    chance = Random("filter")
    for _ in range(EXAMPLES * 4):
        stream = mutated(chance, GOOD)
        assert filtered(pieces(chance, stream)) == stream


def test_filter_takes_out_nothing_but_whole_events_of_a_mutated_stream() -> None:
    chance = Random("taken")
    for _ in range(EXAMPLES * 4):
        stream = mutated(chance, GOOD + USAGE + DONE)
        whole = filtered([stream])
        assert filtered(pieces(chance, stream)) == whole
        assert len(stream) - len(whole) in range(len(stream) + 1)
        rest = iter(stream)
        assert all(byte in rest for byte in whole), "the order changed, or something was put in"


def test_scanner_and_tail_see_the_same_however_a_mutated_stream_is_split() -> None:
    chance = Random("scan")
    for _ in range(EXAMPLES * 4):
        route, stream = chance.choice(ROUTES), b"\n" + mutated(chance, GOOD + USAGE + DONE)
        seen = []
        for parts in ([stream], pieces(chance, stream), [stream[n : n + 1] for n in range(len(stream))]):
            scanner, tail = FirstTokenDetector(route), UsageReader()
            scans: list[StreamState] = []
            for part in parts:
                tail.feed(part)
                if not scans or scans[-1] is StreamState.WAITING:
                    scans.append(scanner.feed(part))
            seen.append((scans[-1], scanner.error_status, tail.usage()))
        assert seen[0] == seen[1] == seen[2]


def test_body_of_anything_has_usage_or_none() -> None:
    chance = Random("usage")
    for _ in range(EXAMPLES * 8):
        usage = read_usage(mutated(chance, USAGE.removeprefix(b"data: ")))
        counts = () if usage is None else (usage.prompt_tokens, usage.cached_tokens, usage.output_tokens)
        assert all(count is None or count >= 0 for count in counts)


def test_line_without_an_end_is_held_in_part_only() -> None:
    usage_filter, scanner, tail = UsageEventFilter(), FirstTokenDetector(ROUTES[0]), UsageReader()
    fed = passed = 0
    for _ in range(400):
        chunk = b"x" * 16_384
        fed += len(chunk)
        passed += len(usage_filter.feed(chunk))
        scanner.feed(chunk)
        tail.feed(chunk)
        assert fed - passed < HELD_BYTES
    for reader in (usage_filter, scanner, tail, scanner._reader):
        names = getattr(reader, "__slots__", ()) or vars(reader)
        held = [value for name in names if isinstance(value := getattr(reader, name), (bytes, bytearray))]
        assert sum(map(len, held)) < HELD_BYTES
