"""The clients: an open loop that asks each question when it is due, and notes how it ended.

Owns connections of clients and the notes. Whether an answer is right is `questions`; a client that waits for longer
than any deadline of the proxy's adds up to is one that was forgotten.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from time import monotonic

import aiohttp

from tests.chaos.fleet import LIMITS
from tests.chaos.questions import Ending, Judge, Question, Verdict, judge_proxy

#: Half as much again as the proxy gives any request.
PATIENCE_S = 1.5 * LIMITS["request_timeout_s"]
#: Open at once; the load has a tenth of it when all is well.
MAX_OPEN = 400


@dataclass(frozen=True, slots=True)
class Note:
    """One request as its client saw it; times as `monotonic` tells them."""

    question: Question
    asked_s: float
    ended_s: float
    verdict: Verdict
    replica: str | None = None
    status: int | None = None


class Load:
    """All questions of one run.

    Parameters
    ----------
    url:
        Of the proxy, or of Envoy.
    judge:
        Says what an answer is worth.
    """

    def __init__(self, url: str, questions: Sequence[Question], judge: Judge = judge_proxy) -> None:
        self._url = url
        self._judge = judge
        self._questions = sorted(questions, key=lambda question: question.at_s)
        self.notes: list[Note] = []
        self.most_open = 0

    async def run(self) -> None:
        """Until the last question has ended."""
        began_s, open_now = monotonic(), set[asyncio.Task[None]]()
        connector = aiohttp.TCPConnector(limit=MAX_OPEN)
        async with aiohttp.ClientSession(connector=connector, auto_decompress=False) as session:
            for question in self._questions:
                await asyncio.sleep(max(0.0, began_s + question.at_s - monotonic()))
                task = asyncio.create_task(self._ask(session, question))
                open_now.add(task)
                task.add_done_callback(open_now.discard)
                self.most_open = max(self.most_open, len(open_now))
            await asyncio.gather(*open_now)

    async def _ask(self, session: aiohttp.ClientSession, question: Question) -> None:
        asked_s, status, replica = monotonic(), None, None
        leaves_s = question.leaves_after_s
        headers = {"x-request-id": question.request_id, "content-type": "application/json"}
        try:
            async with asyncio.timeout(PATIENCE_S if leaves_s is None else leaves_s):
                async with session.post(self._url + question.route, data=question.body, headers=headers) as answer:
                    status, replica = answer.status, answer.headers.get("x-gorgo-replica")
                    body, cut = await _read(answer)
                    verdict = self._judge(question, status, body, cut)
        except TimeoutError:
            forgotten = Verdict(Ending.WRONG, reason=f"no end within {PATIENCE_S:g} s")
            verdict = forgotten if leaves_s is None else Verdict(Ending.LEFT)
        except aiohttp.ClientError as error:
            verdict = Verdict(Ending.WRONG, reason=f"{type(error).__name__}: {error}")
        self.notes.append(Note(question, asked_s, monotonic(), verdict, replica, status))


async def _read(answer: aiohttp.ClientResponse) -> tuple[bytes, str | None]:
    """Return the body as far as it came, and why no more of it did; `None` for all of it."""
    body = bytearray()
    try:
        async for chunk in answer.content.iter_any():
            body += chunk
    except aiohttp.ClientError as error:
        return bytes(body), f"{type(error).__name__}: {error}"
    return bytes(body), None
