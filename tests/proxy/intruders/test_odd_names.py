"""Names from elsewhere in every script and with every mark: what is logged, counted and shown of them."""

from __future__ import annotations

import json
import logging
from collections import Counter
from contextlib import AsyncExitStack, suppress
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from gorgo.config.load import parse_config
from gorgo.errors import ConfigError, TraceError
from gorgo.lab.datasets import read_shape
from gorgo.live.logs import FORMATS
from tests.proxy.conftest import TOKEN, Start
from tests.proxy.fakes import DONE, delta, stream
from tests.proxy.raw import connected

#: Also on the HTTP of `gorgo serve --plain`.
IN_BOTH_FORMS = True

CHAT = "/v1/chat/completions"
NAMES = {
    "right to left": "gpt\u202efdp.exe",
    "isolate": "a\u2066b",
    "NUL": "a\x00b",
    "newline": 'm"\nlevel=error event=forged',
    "escape": "\x1b]0;x\x07\x1b[2J",
    "C1": "a\x9b31mb",
    "homoglyph": "\u0430dmin",
    "four bytes": "\U0001f600" * 60,
    "half a pair": "\ud83d",
    "line separator": "a\u2028b",
    "label": 'm"} 1\nforged{x="',
}


@pytest.mark.parametrize("name", NAMES.values(), ids=NAMES)
async def test_a_model_of_any_name_is_one_line_one_label_and_text_on_the_page(
    start: Start, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    caplog.set_level(logging.INFO, "gorgo")
    fleet = await start.fleet([stream(delta("good"), DONE)])
    body = {"model": name, "messages": [{"role": "user", "content": name}], "user": name, "stream": True}
    answer = await fleet.client.post(CHAT, content=json.dumps(body).encode())
    assert answer.status_code in (200, 400)
    for record in caplog.records:
        json.loads(FORMATS["json"]().format(record))
        first, *more = FORMATS["text"]().format(record).split("\n")
        assert first.isprintable()
        assert all(line.startswith("  ") and line.isprintable() for line in more)
    metrics = (await fleet.admin.get("/metrics")).text
    assert not [family for family in text_string_to_metric_families(metrics) if family.name == "forged"]
    await fleet.admin.post("/admin/page/login", data={"token": TOKEN})
    page = await fleet.admin.get("/admin/page")
    assert page.status_code == 200
    assert not set(page.text) & set("\x00\x07\x1b\x9b\u202e\u2066")
    assert (await fleet.admin.get("/admin/status")).status_code == 200


@pytest.mark.parametrize("name", [name for name in NAMES.values() if not name.isprintable()])
@pytest.mark.parametrize("key", ["region", "replica", "model", "policy"])
def test_a_name_of_the_configuration_is_printable(key: str, name: str) -> None:
    names = {"region": "here", "replica": "r", "model": "m", "policy": "round-robin"} | {key: name}
    document = {
        "proxy": {"region": names["region"], "policy": names["policy"]},
        "regions": [{"name": names["region"]}],
        "replicas": [
            {"name": names["replica"], "region": names["region"], "url": "http://h:1", "models": [names["model"]]}
        ],
    }
    with pytest.raises(ConfigError) as refused:
        parse_config(json.dumps(document).encode())
    assert all(line.isprintable() for line in str(refused.value).split("\n"))


@pytest.mark.parametrize("text", ["x = " + "[" * 8000, "x = " + "9" * 8000, "a" + ".a" * 4000 + " = 1", "x = nan"])
def test_a_shape_that_no_one_writes_is_refused_by_its_file(tmp_path: Path, text: str) -> None:
    (tmp_path / "shape.toml").write_text(text)
    with pytest.raises(TraceError, match=r"shape\.toml: "):
        read_shape(tmp_path / "shape.toml")


async def test_a_thousand_that_ask_for_live_pages_get_eight_and_the_operator_is_answered(start: Start) -> None:
    fleet = await start.fleet([stream(delta("good"), DONE)])
    ask = f"GET /admin/page/events HTTP/1.1\r\nhost: g\r\nauthorization: Bearer {TOKEN}\r\n\r\n".encode()
    heads = []
    async with AsyncExitStack() as opened:
        for _ in range(1000):
            client = await opened.enter_async_context(connected(fleet.addresses.admin))
            client.writer.write(ask)
            with suppress(EOFError, ConnectionError):
                heads.append(await client.head())
        statuses = Counter(head.split(b" ")[1] for head in heads)
        assert statuses.keys() == {b"200", b"503"}
        assert statuses[b"200"] <= 8
        assert (await fleet.admin.get("/admin/status")).status_code == 200
    await fleet.idle()
