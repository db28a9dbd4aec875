"""Made rows as a trace: order, times, and which blocks are the same."""

from __future__ import annotations

import json
from typing import Any

from gorgo.apps.datasets.synthetic import MadeRow, as_lines, as_requests


def row(timestamp_ms: int, tokens: int, **more: Any) -> MadeRow:
    given: dict[str, Any] = {"shared": ("system", 1), "shared_tokens": 1024, "own": ("text", 1), "output_tokens": 7}
    return MadeRow(timestamp_ms=timestamp_ms, input_tokens=tokens, **given | more)


def test_blocks_of_a_shared_beginning_are_everybody_s_and_a_block_that_grows_is_another() -> None:
    """Blocks of 512 tokens: two of the system prompt, then the row's own."""
    rows = [
        row(0, 1300),
        row(1, 1536),
        row(2, 2000),
        row(3, 1536, own=("text", 2)),
        # One token of the second block lies behind the shared text: then it is the row's own.
        row(4, 1536, own=("text", 3), shared_tokens=1023),
        row(5, 512),
    ]
    assert [request.hash_ids for request in as_requests(rows)] == [
        (0, 1, 2),
        (0, 1, 3),
        (0, 1, 3, 4),
        (0, 1, 5),
        (0, 6, 7),
        (0,),
    ]


def test_rows_are_in_the_order_of_time_and_numbered_so() -> None:
    rows = [row(2500, 512, user="b", turn=2), row(500, 600, own=("text", 9))]
    first, second = as_requests(rows)
    assert [(one.index, one.timestamp_s, one.input_tokens, one.output_tokens) for one in (first, second)] == [
        (0, 0.5, 600, 7),
        (1, 2.5, 512, 7),
    ]
    assert [(one.user, one.turns) for one in (first, second)] == [(None, None), ("b", 2)]
    assert [json.loads(line) for line in as_lines(rows).splitlines()] == [
        {"timestamp": 500, "input_length": 600, "output_length": 7, "hash_ids": [0, 1]},
        {"timestamp": 2500, "input_length": 512, "output_length": 7, "hash_ids": [0], "user_id": "b", "turn": 2},
    ]
