"""A service for tests of the transport: it answers each message, and notes what it gets."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from gorgo.picker.protocol.messages import ProtocolError
from gorgo.picker.transport.services import Output


@dataclass
class EchoCall:
    """Answers as the message says: `later ...` after the call has returned, `end`, `wrong`, `broken`."""

    output: Output
    received: list[bytes] = field(default_factory=list)
    ends: int = 0
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    def feed(self, message: bytes) -> None:
        self.received.append(message)
        word = message[:8].partition(b" ")[0]
        if word == b"end":
            self.output.send_message(b"last")
            self.output.end_call()
        elif word == b"wrong":
            raise ProtocolError("expected another word")
        elif word == b"broken":
            raise ZeroDivisionError
        elif word == b"later":
            asyncio.get_running_loop().call_later(0.01, self.output.send_message, b"late")
        elif word == b"endlater":
            asyncio.get_running_loop().call_later(0.01, self.output.end_call)
        elif word == b"pieces":
            for number in range(int(message.split()[1])):
                self.output.send_message(b"%d " % number + b"x" * 60_000)
        elif word != b"quiet":
            self.output.send_message(b"echo " + message)

    def closed(self) -> None:
        self.ends += 1
        self.ended.set()
