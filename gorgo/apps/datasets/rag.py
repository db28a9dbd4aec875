"""The generator of retrieval-augmented prompts: one system prompt, documents by popularity, a question."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from itertools import accumulate

from gorgo.apps.datasets.distributions import RandomDraws
from gorgo.apps.datasets.prefix_shapes import RagShape
from gorgo.apps.datasets.synthetic import MadeRow, TextName


def rag_rows(shape: RagShape) -> Iterator[MadeRow]:
    """The requests in the order of time."""
    draws, now_s, number = RandomDraws(shape.seed), 0.0, 0
    lengths = [
        max(1, round(draws.log_normal(shape.document_median, shape.document_sigma))) for _ in range(shape.documents)
    ]
    shares = list(accumulate((place + 1) ** -shape.popularity for place in range(shape.documents)))
    while True:
        now_s += draws.exponential(1 / shape.rate_per_s)
        if now_s >= shape.duration_s:
            return
        number += 1
        retrieved = 0 if draws.uniform() < shape.plain_share else shape.retrieved
        documents = _drawn(draws, shares, retrieved)
        parts: tuple[tuple[TextName, int], ...] = tuple((("document", one), lengths[one]) for one in documents)
        question = max(1, round(draws.log_normal(shape.question_median, shape.question_sigma)))
        output = draws.log_normal(shape.output_median, shape.output_sigma)
        yield MadeRow(
            timestamp_ms=int(1000 * now_s),
            shared=("system", 0),
            shared_tokens=shape.system_tokens,
            parts=parts,
            own=("question", number),
            input_tokens=shape.system_tokens + sum(tokens for _, tokens in parts) + question,
            output_tokens=max(1, min(shape.output_max, round(output))),
        )


def _drawn(draws: RandomDraws, shares: list[float], count: int) -> list[int]:
    """Return distinct documents in the order of their draws."""
    drawn: dict[int, None] = {}
    while len(drawn) < min(count, len(shares)):
        drawn[min(bisect_right(shares, draws.uniform() * shares[-1]), len(shares) - 1)] = None
    return list(drawn)
