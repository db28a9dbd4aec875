"""Files of operators, mutated: read, or refused by an error of ours; never anything else."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from tempfile import NamedTemporaryFile
from typing import Any

import pytest

from gorgo.config.load import parse_config
from gorgo.config.model import ClientsConfig
from gorgo.config.weights_file import parse_weights_file
from gorgo.errors import GorgoError
from gorgo.lab.traces.rows import read_row
from gorgo.live.control.state_file import parse_state
from gorgo.live.request_options import read_client_keys
from tests.proxy.fuzz.mutate import EXAMPLES, mutated, odd_value

ROOT = Path(__file__).parents[3]
REGIONS = (ROOT / "regions.yaml").read_bytes()
WEIGHTS = b'{"policy": "gorgo-ms", "weights": {"w_rtt": 1.0, "lambda": 0.2}, "note": "x"}'
STATE = json.dumps(
    {
        "gorgo_state": 1,
        "policy": "gorgo-ms",
        "weights": {"w_rtt": 1.0},
        "version": 3,
        "frozen": None,
        "draining": [],
        "configured": {"policy": "gorgo-ms", "weights": {}, "draining": []},
    }
).encode()
ROW = b'{"timestamp": 27482, "input_length": 1955, "output_length": 52, "hash_ids": [46, 47, 48, 49]}'


def read_trace_row(text: bytes) -> object:
    return read_row(text.decode("utf-8", "surrogateescape"), file="t", line_number=1, index=0)


def read_keys(text: bytes) -> object:
    with NamedTemporaryFile() as file:
        file.write(text)
        file.flush()
        return read_client_keys(ClientsConfig(keys_file=file.name))


READERS: dict[str, tuple[bytes, Callable[[bytes], object]]] = {
    "regions.yaml": (REGIONS, parse_config),
    "weights": (WEIGHTS, lambda text: parse_weights_file(text, source="w")),
    "state": (STATE, lambda text: parse_state(text, source="s")),
    "trace": (ROW, read_trace_row),
    "client keys": (
        b"# team a and team b, since May; rotated in autumn\na:" + b"0" * 64 + b"\nb:" + b"1" * 64,
        read_keys,
    ),
}


@pytest.mark.parametrize("kind", READERS)
def test_file_with_faults_is_read_or_refused_by_an_error_of_ours(kind: str) -> None:
    good, read = READERS[kind]
    chance = Random(f"file {kind}")
    assert read(good), "what is read before it has faults"
    count = EXAMPLES // 4 if kind == "regions.yaml" else EXAMPLES * 4
    assert_some_are_read(read, [mutated(chance, good) for _ in range(count)])


@pytest.mark.parametrize("kind", ["weights", "state", "trace"])
def test_file_with_odd_values_is_read_or_refused_by_an_error_of_ours(kind: str) -> None:
    good, read = READERS[kind]
    chance = Random(f"values {kind}")
    texts = []
    for _ in range(EXAMPLES * 4):
        fields: dict[str, Any] = json.loads(good)
        for key in chance.sample(list(fields), chance.randint(1, len(fields))):
            fields[key] = odd_value(chance)
        texts.append(json.dumps(fields).encode())
    assert_some_are_read(read, texts)


def assert_some_are_read(read: Callable[[bytes], object], texts: Sequence[bytes]) -> None:
    """Faults that are all refused, or none, would show nothing of the other half."""
    refused = 0
    for text in texts:
        try:
            read(text)
        except GorgoError:
            refused += 1
    assert 0 < refused < len(texts)
