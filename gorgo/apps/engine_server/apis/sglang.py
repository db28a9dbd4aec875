"""SGLang's own `/generate`, and embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gorgo.apps.engine_server import shapes
from gorgo.apps.engine_server.streams import ResponseFormat, Served, Streamed
from gorgo.apps.engine_server.text import vector

#: Finish reason of every answer: it has all requested tokens.
_FINISH = "length"


class GenerateFormat(ResponseFormat):
    """`/generate`: a list of prompts has a list of answers."""

    def whole(self, answers: Sequence[Served]) -> object:
        made = [generated(served, _FINISH) for served in answers]
        return made if answers[0].job.is_list else made[0]

    def closing(self, served: Served) -> bytes:
        return shapes.DONE if served.all_finished else b""


class GenerateStream(Streamed):
    """The stream of `/generate`: every event has the whole answer so far."""

    def emit(self, now: float) -> None:
        if self.finished:
            self.ended_s = now
        piece = shapes.event(generated(self, _FINISH if self.finished else None))
        if self.finished:
            self._send_edge(b"", piece, now)
        else:
            self._send(self.lead, self._frame(piece), now)
        self._strike(now)


def generated(served: Served, finish: str | None) -> dict[str, Any]:
    """Return the answer so far, with SGLang's account of the generation."""
    meta: dict[str, Any] = {
        "id": served.rid,
        "finish_reason": None if finish is None else {"type": finish, "length": served.emitted},
        "prompt_tokens": served.prompt_tokens,
        "weight_version": "default",
        "completion_tokens": served.emitted,
        "cached_tokens": served.cached_tokens,
    }
    if served.ended_s is not None:
        meta["e2e_latency"] = served.ended_s - served.submitted_s
    answer = {"text": served.text, "output_ids": served.answer.ids(served.emitted), "meta_info": meta}
    return {**answer, "index": served.index} if served.job.is_list else answer


class EmbeddingFormat(ResponseFormat):
    """`/v1/embeddings`: a vector per input."""

    def whole(self, answers: Sequence[Served]) -> object:
        data = [
            {"object": "embedding", "index": served.index, "embedding": vector(served.prompt)} for served in answers
        ]
        tokens = sum(served.prompt_tokens for served in answers)
        used = {"prompt_tokens": tokens, "total_tokens": tokens}
        return {"object": "list", "model": answers[0].head["model"], "data": data, "usage": used}
