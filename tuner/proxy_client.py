"""The tuner's view of a running proxy: its admin API over HTTP.

Owns requests, their bounds and errors. Every call is tried once; callers repeat it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import httpx

from gorgo.errors import ProxyRefused, ProxyUnreachable

#: The admin listener answers from memory; the network may be slower.
TIMEOUT_S = 10.0
#: Samples per call; the proxy's own bound too.
MAX_SAMPLES = 1000
#: Characters of a reason; the proxy's own bound too.
MAX_TEXT = 1000
#: Of an answer: a thousand samples of 1 kB, ten times over.
MAX_ANSWER_BYTES = 10 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class ProxyWeights:
    """The weights by which the proxy routes.

    `frozen` is the reason of a freeze; None without one. `source` and `by` are those of the newest entry of the proxy's
    history; None if the call does not return them.
    """

    policy: str
    version: int
    values: Mapping[str, float]
    frozen: str | None
    source: str | None = None
    by: str | None = None


@dataclass(frozen=True, slots=True)
class SampleBatch:
    """Samples after a cursor. A `first_seq` beyond the cursor's is a gap, another `boot_id` a restart.

    `now_s` is the proxy's clock; None from a version that does not send it.
    """

    boot_id: str
    first_seq: int
    last_seq: int
    samples: tuple[Mapping[str, Any], ...]
    now_s: float | None = None


class ProxyClient:
    """Calls one proxy's admin API.

    Parameters
    ----------
    url:
        Base URL of the admin listener.
    token:
        Its bearer token.
    transport:
        For tests; the network by default.
    timeout_s:
        Of one call.

    Every method raises `ProxyUnreachable` when there is no answer and `ProxyRefused` when the answer is an error.
    """

    def __init__(
        self,
        url: str,
        token: str | None,
        *,
        transport: httpx.AsyncBaseTransport | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        headers = {} if token is None else {"authorization": f"Bearer {token}"}
        self.url = url.rstrip("/")
        self._http = httpx.AsyncClient(
            base_url=self.url, headers=headers, timeout=timeout_s, transport=transport, trust_env=False
        )

    async def __aenter__(self) -> ProxyClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self._http.aclose()

    async def weights(self) -> ProxyWeights:
        """Return the weights in force, with source and author."""
        return _weights(await self._call("GET", "/admin/weights"))

    async def routing(self) -> ProxyWeights:
        """Return the same in a smaller answer, without source and author: for polls every second."""
        return _weights(await self._call("GET", "/admin/policy"))

    async def put_weights(
        self,
        values: Mapping[str, float],
        *,
        expected_version: int,
        reason: str,
        by: str,
        allow_out_of_range: bool = False,
    ) -> ProxyWeights:
        """Set weights if the version is the expected one; a 409 means that it is not, or that they are frozen."""
        body = {"weights": dict(values), "expected_version": expected_version} | _change(reason, by, allow_out_of_range)
        return _weights(await self._call("PUT", "/admin/weights", body))

    async def roll_back(
        self,
        values: Mapping[str, float],
        *,
        expected_version: int,
        reason: str,
        by: str,
        allow_out_of_range: bool = False,
    ) -> ProxyWeights:
        """Do as `put_weights`: one proxy takes weights or does not."""
        return await self.put_weights(
            values, expected_version=expected_version, reason=reason, by=by, allow_out_of_range=allow_out_of_range
        )

    async def freeze(
        self, *, reason: str, by: str, weights: Mapping[str, float] | None = None, allow_out_of_range: bool = False
    ) -> ProxyWeights:
        body = _change(reason, by, allow_out_of_range) | ({} if weights is None else {"weights": dict(weights)})
        return _weights(await self._call("POST", "/admin/freeze", body))

    async def samples(self, after: int) -> SampleBatch:
        """Return samples numbered above `after`, at most `MAX_SAMPLES`."""
        answer = await self._call("GET", f"/admin/samples?after={after}&limit={MAX_SAMPLES}")
        try:
            now_s = answer.get("now_s")
            batch = SampleBatch(
                str(answer["boot_id"]),
                int(answer["first_seq"]),
                int(answer["last_seq"]),
                tuple(answer["samples"]),
                None if now_s is None else float(now_s),
            )
            _ = [(int(sample["seq"]), str(sample["replica"])) for sample in batch.samples]
        except (LookupError, TypeError, ValueError):
            raise ProxyRefused(f"{self.url}/admin/samples: no samples in the answer; is this a gorgo proxy?") from None
        return batch

    async def _call(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        where = f"{method} {self.url}{path}"
        try:
            response = await self._http.request(method, path, json=body)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise ProxyUnreachable(f"{where}: {type(error).__name__} {error}".rstrip()) from error
        if response.is_error:
            raise ProxyRefused(f"{where}: {response.status_code} {_message(response)}", status=response.status_code)
        try:
            answer = response.json() if len(response.content) <= MAX_ANSWER_BYTES else None
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            raise ProxyRefused(f"{where}: the answer is no JSON object; is this the admin address of a gorgo proxy?")
        return answer


def _change(reason: str, by: str, allow_out_of_range: bool) -> dict[str, Any]:
    return {"reason": reason[:MAX_TEXT], "by": by} | ({"allow_out_of_range": True} if allow_out_of_range else {})


def _weights(answer: Mapping[str, Any]) -> ProxyWeights:
    try:
        frozen = answer.get("frozen")
        values = {str(name): float(value) for name, value in answer["weights"].items()}
        newest = (answer.get("history") or [{}])[-1]
        source, by = newest.get("source"), newest.get("by")
        return ProxyWeights(str(answer["policy"]), int(answer["version"]), values, _why(frozen), source, by)
    except (LookupError, TypeError, ValueError, AttributeError):
        raise ProxyRefused("/admin/weights: no weights in the answer; is this a gorgo proxy?") from None


def _why(frozen: object) -> str | None:
    if not frozen:
        return None
    reason = frozen.get("reason") if isinstance(frozen, Mapping) else None
    return str(reason or "no reason was given")


def _message(response: httpx.Response) -> str:
    """Return the message of an OpenAI-shaped error."""
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return response.text[:200]
