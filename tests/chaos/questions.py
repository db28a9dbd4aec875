"""What is asked, and what the right answer is.

Owns the load's requests and the verdict on each answer. A simulated engine says the same to the same prompt, so the
right text is known before anything is sent, whichever replica answers; what differs from replica to replica is the id
of the answer, which must be one and the same in all events of a stream.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from hashlib import sha256
from typing import Any

import numpy as np

from gorgo.core.prompt.parse import read_prompt
from gorgo.lab.datasets.catalogue import generate_requests
from gorgo.lab.datasets.shape import UsersShape
from gorgo.lab.engine_server.job import CHAT, COMPLETIONS, GENERATE
from gorgo.lab.engine_server.streams import Tape
from gorgo.lab.prompt_text import request_text

MODEL = "gorgo-sim"
#: Route, streamed, share.
_MIX = (
    (CHAT, True, 0.36),
    (COMPLETIONS, True, 0.19),
    (GENERATE, True, 0.15),
    (CHAT, False, 0.12),
    (COMPLETIONS, False, 0.1),
    (GENERATE, False, 0.08),
)
#: So many clients go away before they have their answer, after up to so long.
LEAVING_SHARE, LEAVING_S = 0.04, 1.5
#: Tokens of an answer: streams long enough to be hit, whole answers within the time to the first content at x3.
STREAM_TOKENS, WHOLE_TOKENS = (24, 160), (8, 40)
_TAPE = Tape(longest=STREAM_TOKENS[1])


class Ending(Enum):
    """How a request ended, as its client saw it."""

    COMPLETE = "complete"
    #: A JSON error before any content.
    REFUSED = "refused"
    #: An error event in a stream that had begun.
    CUT = "cut with an error event"
    #: The client itself went away.
    LEFT = "client left"
    #: What must not be: a body that is wrong, cut or not the form of an error, or no end at all.
    WRONG = "wrong"


@dataclass(frozen=True, slots=True)
class Question:
    """One request of the load."""

    request_id: str
    at_s: float
    route: str
    stream: bool
    body: bytes
    #: SHA-256 of the right text.
    digest: str
    text: str
    leaves_after_s: float | None = None


@dataclass(frozen=True, slots=True)
class Verdict:
    """How it ended; `code` is the error's own word, `reason` what was wrong."""

    ending: Ending
    code: str | None = None
    reason: str | None = None
    content: int = 0


def draw_questions(seed: int, *, seconds: float, per_s: float) -> list[Question]:
    """A window of users like that of the ART-Chat traces, shorter in every way, over all routes."""
    rng = np.random.default_rng([seed, 1])
    rows = generate_requests(_shape(seed, seconds, round(seconds * per_s)))
    first_s = min(row.timestamp_s for row in rows)
    return [
        _question(f"chaos-{seed}-{number}", row.timestamp_s - first_s, request_text(row).decode("ascii"), rng)
        for number, row in enumerate(rows)
    ]


def _shape(seed: int, seconds: float, requests: int) -> UsersShape:
    """The shape of datasets/art-chat-apr5.toml with prompts of an eighth and pauses of a tenth."""
    return UsersShape(
        seed=seed,
        duration_s=seconds,
        users=max(1, requests // 8),
        requests=requests,
        requests_sigma=1.1,
        one_shot_share=0.235,
        one_shot_own=0.2,
        conversation_requests=14.0,
        retry_budget_ratio=0.28,
        input_quantiles=((0.0, 20), (0.25, 280), (0.5, 720), (0.75, 980), (0.95, 2500), (1.0, 2900)),
        input_max=3000,
        system_median=190,
        system_sigma=0.6,
        applications=6,
        application_tokens=128,
        application_share=0.4,
        turn_median=27,
        turn_sigma=0.4,
        answer_share=0.65,
        output_max=128,
        pause_s_min=0.3,
        pause_s_median=2.5,
        pause_sigma=0.7,
        swing=0.15,
        waves=3,
    )


def _question(request_id: str, at_s: float, text: str, rng: np.random.Generator) -> Question:
    route, stream, _ = _MIX[int(rng.choice(len(_MIX), p=[share for *_, share in _MIX]))]
    tokens = int(rng.integers(*(STREAM_TOKENS if stream else WHOLE_TOKENS)))
    body = _body(route, text, tokens, stream)
    right = right_text(route, body, tokens)
    leaves = float(rng.uniform(0, LEAVING_S)) if rng.random() < LEAVING_SHARE else None
    digest = sha256(right.encode()).hexdigest()
    return Question(request_id, at_s, route, stream, json.dumps(body).encode(), digest, right, leaves)


def _body(route: str, text: str, tokens: int, stream: bool) -> dict[str, Any]:
    if route == GENERATE:
        return {"text": text, "sampling_params": {"max_new_tokens": tokens}, "stream": stream}
    asked: dict[str, Any] = {"model": MODEL, "max_tokens": tokens, "stream": stream}
    if stream:
        asked["stream_options"] = {"include_usage": True}
    return asked | ({"prompt": text} if route == COMPLETIONS else {"messages": [{"role": "user", "content": text}]})


def right_text(route: str, body: Mapping[str, Any], tokens: int) -> str:
    """What any replica says to that body."""
    return _TAPE.text(_TAPE.start(read_prompt(route, dict(body)).text), tokens).decode("ascii")


# -- the verdict

#: On the question, the status, what came of the body, and why no more of it did.
Judge = Callable[[Question, int, bytes, str | None], Verdict]
#: Code of an answer that ends in its middle, and of one that Envoy made itself.
CUT_OFF, OF_ENVOY = "cut_off", "of_envoy"


def judge_proxy(question: Question, status: int, body: bytes, cut: str | None) -> Verdict:
    """On an answer of the proxy, which never ends in the middle of a body."""
    return judge(question, status, body) if cut is None else Verdict(Ending.WRONG, reason=cut)


def judge_behind_envoy(question: Question, status: int, body: bytes, cut: str | None) -> Verdict:
    """On an answer through Envoy, which ends where the replica's does, and has errors of its own as plain text."""
    if cut is not None:
        return _cut_off(question, body) if status == 200 else Verdict(Ending.REFUSED, CUT_OFF)
    if status >= 500 and not body.startswith(b"{"):
        return Verdict(Ending.REFUSED, OF_ENVOY)
    return judge(question, status, body)


def _cut_off(question: Question, body: bytes) -> Verdict:
    """On the beginning of an answer: what of it is whole must be right."""
    if not question.stream:
        return Verdict(Ending.CUT, CUT_OFF)
    try:
        # Of a body whose last chunk is missing the last event may have come.
        whole = body.removesuffix(b"data: [DONE]\n\n").split(b"\n\n")[:-1]
        read = list(_events([event for event in whole if event.strip()], torn=False))
        texts = [_text_of(question.route, event, "delta") for event in read]
    except (ValueError, LookupError, TypeError) as error:
        return Verdict(Ending.WRONG, CUT_OFF, f"{type(error).__name__}: {error}; {body[-80:]!r}")
    text = (texts[-1] if texts else "") if question.route == GENERATE else "".join(texts)
    if not question.text.startswith(text):
        return Verdict(Ending.WRONG, CUT_OFF, "what came before the cut is not the beginning of the right answer")
    return Verdict(Ending.CUT, CUT_OFF, content=sum(bool(each) for each in texts))


def judge(question: Question, status: int, body: bytes) -> Verdict:
    """On an answer that came whole, by the rules of HTTP."""
    try:
        if status != 200:
            return _refused(status, body)
        return _stream(question, body) if question.stream else _whole(question, body)
    except (ValueError, LookupError, TypeError) as error:
        return Verdict(Ending.WRONG, reason=f"{type(error).__name__}: {error}; {body[-80:]!r}")


def _refused(status: int, body: bytes) -> Verdict:
    code = _error_code(json.loads(body))
    if status < 400 or code is None:
        return Verdict(Ending.WRONG, reason=f"status {status} without an error in OpenAI's form: {body[:80]!r}")
    return Verdict(Ending.REFUSED, f"{status} {code}")


def _error_code(answer: Any) -> str | None:
    error = answer.get("error") if isinstance(answer, dict) else None
    if not isinstance(error, dict) or not error.get("message") or not error.get("type"):
        return None
    return str(error.get("code"))


def _whole(question: Question, body: bytes) -> Verdict:
    return _complete(question, _text_of(question.route, json.loads(body), "content"), 1)


def _stream(question: Question, body: bytes) -> Verdict:
    """Ends in `[DONE]` or in an error event, once and last."""
    events = [event for event in body.split(b"\n\n") if event.strip() and not event.startswith(b":")]
    if not body.endswith(b"\n\n") or not events:
        return Verdict(Ending.WRONG, reason=f"the stream ends in mid-event: {body[-80:]!r}")
    last, ends = events[-1], sum(event == b"data: [DONE]" for event in events)
    code = None if last == b"data: [DONE]" else _error_code(_data(last))
    if ends + (code is not None) != 1:
        return Verdict(Ending.WRONG, reason=f"{ends} ends, last event {last[:80]!r}")
    # An event that was cut in the middle may stand before an error.
    read = list(_events(events[:-1], torn=code is not None))
    ids = {event.get("id") or event.get("meta_info", {}).get("id") for event in read}
    if len(ids) > 1:
        return Verdict(Ending.WRONG, reason=f"events of several answers: {sorted(map(str, ids))}")
    finishes, usages = sum(map(_finishes, read)), sum(isinstance(event.get("usage"), dict) for event in read)
    if finishes > 1 or usages > 1:
        return Verdict(Ending.WRONG, reason=f"{finishes} finish reasons and {usages} counts of tokens")
    texts = [_text_of(question.route, event, "delta") for event in read]
    text = (texts[-1] if texts else "") if question.route == GENERATE else "".join(texts)
    content = sum(bool(each) for each in texts)
    if code is None:
        return _complete(question, text, content)
    if not question.text.startswith(text):
        return Verdict(Ending.WRONG, code, "what came before the error is not the beginning of the right answer")
    return Verdict(Ending.CUT, code, content=content)


def _finishes(event: Mapping[str, Any]) -> int:
    """How many finish reasons an event has."""
    ends = [choice.get("finish_reason") for choice in event.get("choices") or []]
    return sum(end is not None for end in [*ends, (event.get("meta_info") or {}).get("finish_reason")])


def _events(events: list[bytes], *, torn: bool) -> Iterator[dict[str, Any]]:
    for number, event in enumerate(events):
        try:
            yield _data(event)
        except ValueError:
            if not torn or number != len(events) - 1:
                raise


def _data(event: bytes) -> dict[str, Any]:
    if not event.startswith(b"data: "):
        raise ValueError(f"no data event: {event[:80]!r}")
    read = json.loads(event[6:])
    if not isinstance(read, dict):
        raise ValueError(f"no object: {event[:80]!r}")
    return read


def _text_of(route: str, answer: Mapping[str, Any], message: str) -> str:
    """Of a whole answer (`message` is `content`) or of one event (`delta`)."""
    if route == GENERATE:
        return str(answer["text"])
    if not answer["choices"]:
        return ""
    choice = answer["choices"][0]
    if route == COMPLETIONS:
        return str(choice["text"])
    return str((choice["message"] if message == "content" else choice["delta"]).get("content") or "")


def _complete(question: Question, text: str, content: int) -> Verdict:
    if sha256(text.encode()).hexdigest() != question.digest:
        return Verdict(Ending.WRONG, reason=f"{len(text)} characters that are not the {len(question.text)} right ones")
    return Verdict(Ending.COMPLETE, content=content)
