"""Keys, quotas and names of models where a gateway carries the bodies: what the replica gets, and who is refused."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from gorgo.config.model import ClientRuleConfig, ClientsConfig, Config, ModelConfig
from tests.picker.duplex import begin, returned
from tests.picker.virtual import (
    BODY,
    DUPLEX,
    Picked,
    VirtualPicker,
    body_message,
    config_of,
    error_of,
    headers_message,
    in_virtual_time,
)
from tests.proxy.conftest import with_replica

KEYS = {"main": "key-of-the-main-client", "small": "key-of-the-small-client"}
MAIN = ("authorization", f"Bearer {KEYS['main']}")


def with_keys(folder: Path) -> Config:
    """One request in ten seconds for `small`, any number for `main`."""
    lines = [f"{name}:{hashlib.sha256(key.encode()).hexdigest()}" for name, key in KEYS.items()]
    file = folder / "keys"
    file.write_text("\n".join(lines))
    rules = (ClientRuleConfig(name="small", requests_per_minute=6.0),)
    return config_of("10.0.0.1:8000", clients=ClientsConfig(keys_file=str(file), rules=rules))


def test_a_key_is_the_picker_s_and_no_replica_gets_it(tmp_path: Path) -> None:
    async def test(picker: VirtualPicker) -> None:
        call = begin(picker, MAIN)
        head, *body = call.feed(body_message("request_body", BODY))
        assert "authorization" in Picked(head).common.header_mutation.remove_headers
        assert returned(body, "request_body") == BODY
        call.close()
        assert picker.total("gorgo_client_requests_total", client="main", model="other", status="499") == 1

    in_virtual_time(test, with_keys(tmp_path))


@pytest.mark.parametrize("headers", [(), (("authorization", "Bearer wrong"),)])
def test_a_request_without_a_known_key_is_401_before_its_body(
    tmp_path: Path, headers: tuple[tuple[str, str], ...]
) -> None:
    async def test(picker: VirtualPicker) -> None:
        call = picker.call()
        (refusal,) = call.feed(headers_message("request_headers", *headers, mode=DUPLEX, response_mode=DUPLEX))
        assert error_of(refusal)[0] == 401
        assert call.feed(body_message("request_body", BODY)) == []
        assert call.output.ends == 1
        call.close()

    in_virtual_time(test, with_keys(tmp_path))


def test_a_used_up_quota_is_429_and_no_byte_of_the_body_comes_back(tmp_path: Path) -> None:
    async def test(picker: VirtualPicker) -> None:
        key = ("authorization", f"Bearer {KEYS['small']}")
        first = begin(picker, key)
        assert returned(first.feed(body_message("request_body", BODY))[1:], "request_body") == BODY
        first.close()
        second = begin(picker, key)
        (refusal,) = second.feed(body_message("request_body", BODY))
        status, code, headers = error_of(refusal)
        assert (status, code) == (429, "client_rate")
        assert 1 <= int(headers["retry-after"]) <= 10
        second.close()
        other = begin(picker, MAIN)
        assert len(other.feed(body_message("request_body", BODY))) == 2
        other.close()

    in_virtual_time(test, with_keys(tmp_path))


def test_a_long_body_gets_the_replica_s_name_of_the_model_and_all_else_comes_back(tmp_path: Path) -> None:
    config = config_of("10.0.0.1:8000", models=(ModelConfig(name="llama", aliases=("m",)),))
    config = with_replica(config, 0, models=("llama",), request_usage=True)
    text = "".join(f"{number:06d} " for number in range(40_000))
    body = json.dumps({"messages": [{"role": "user", "content": text}], "stream": True, "model": "m"}).encode()

    async def test(picker: VirtualPicker) -> None:
        call = begin(picker)
        for start in range(0, len(body), 65_536):
            call.feed(body_message("request_body", body[start : start + 65_536], end=False))
        call.feed(body_message("request_body", b""))
        head, *pieces = call.output.sent
        changed = returned(pieces, "request_body")
        assert len(pieces) == -(-len(changed) // 62_000) == 5
        options = b',"stream_options":{"include_usage":true}}'
        assert changed == body[:-1].replace(b'"model": "m"', b'"model": "llama"') + options
        assert Picked(head).headers["content-length"] == str(len(changed))
        call.close()

    in_virtual_time(test, config)


def test_an_unknown_model_is_404_and_nothing_comes_back() -> None:
    async def test(picker: VirtualPicker) -> None:
        call = begin(picker)
        (refusal,) = call.feed(body_message("request_body", BODY))
        assert error_of(refusal)[:2] == (404, "model_not_found")
        call.close()

    in_virtual_time(test, with_replica(config_of("10.0.0.1:8000"), 0, models=("llama",)))


#: Orders to engines, other spellings of a route with a prompt, and answers that somebody has stored.
OTHER_PATHS = [
    "/invocations",
    "/v1/chat%2fcompletions",
    "/v1/chat/completions/",
    "//v1/chat/completions",
    "/v1/load_lora_adapter",
    "/flush_cache",
    "/update_weights_from_disk",
    "/sleep",
    "/v1/responses/resp_1",
    "/health",
    "/metrics",
]


@pytest.mark.parametrize("kind", ["keys", "models", "engine"])
def test_behind_a_gateway_no_path_goes_round_keys_models_and_an_engines_key(tmp_path: Path, kind: str) -> None:
    config, headers, environ = with_keys(tmp_path), (MAIN,), {}
    if kind == "models":
        config = config_of("10.0.0.1:8000", models=(ModelConfig(name="m", allowed_regions=("here",)),))
    elif kind == "engine":
        config, environ = (
            with_replica(config_of("10.0.0.1:8000"), 0, api_key_env="ENGINE_KEY"),
            {"ENGINE_KEY": "k" * 16},
        )

    async def test(picker: VirtualPicker) -> None:
        for path in OTHER_PATHS:
            for method in ("POST", "GET"):
                call = picker.call()
                message = headers_message("request_headers", *headers, mode=DUPLEX, method=method, path=path, end=True)
                (refusal,) = call.feed(message)
                assert error_of(refusal)[:2] == (404, "not_found"), path
                call.close()
        for path, method in (("/v1/completions", "PUT"), ("/v1/models", "POST")):
            call = picker.call()
            message = headers_message("request_headers", *headers, mode=DUPLEX, method=method, path=path, end=True)
            (refusal,) = call.feed(message)
            assert error_of(refusal)[:2] == (405, "method_not_allowed"), path
            call.close()
        call = picker.call()
        (head,) = call.feed(
            headers_message("request_headers", *headers, mode=DUPLEX, method="GET", path="/v1/models", end=True)
        )
        assert Picked(head).addresses == ["10.0.0.1:8000"], "nothing is listed yet"
        call.close()
        call = begin(picker, *headers)
        assert Picked(call.feed(body_message("request_body", BODY))[0]).addresses == ["10.0.0.1:8000"]
        call.close()

    in_virtual_time(test, config, environ=environ)
