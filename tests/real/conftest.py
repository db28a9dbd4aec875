"""Two llama.cpp servers for the whole run, or one loud reason why there are none."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.real.llama_server import LlamaServer, llama_server, missing_reason
from tests.real.tiny_model import make_tiny_model


@pytest.fixture(scope="session")
def llama_servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LlamaServer, LlamaServer]]:
    reason = missing_reason()
    if reason:
        pytest.skip(reason)
    model = make_tiny_model(tmp_path_factory.mktemp("llama") / "tiny.gguf")
    with ExitStack() as stack:
        yield stack.enter_context(llama_server(model)), stack.enter_context(llama_server(model))
