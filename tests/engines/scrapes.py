"""Full scrapes of engines; where each is from stands in fixtures/README.md."""

from __future__ import annotations

import json
from pathlib import Path

FIXTURES = Path(__file__).with_name("fixtures")

#: The metrics of a busy engine, by dialect.
METRICS = {
    "sglang": (FIXTURES / "sglang-0.5.23.txt").read_text(),
    "vllm": (FIXTURES / "vllm-0.32.0.txt").read_text(),
    "llamacpp": (FIXTURES / "llamacpp-2026.10.txt").read_text(),
}

LLAMACPP_SLOTS: object = json.loads((FIXTURES / "llamacpp-slots-2026.10.json").read_text())
