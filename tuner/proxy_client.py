"""The tuner's view of a running proxy: its admin API over HTTP, and its samples page by page.

Owns requests, their bounds and errors. Every call is tried once; callers repeat it. `read_new` returns each sample
once, in order, with the number of lost ones; `tuner.objective.SampleCursor` decides by the same numbers which samples
are new, so a repeated page changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol

import httpx

from gorgo.errors import ProxyRefused, ProxyUnreachable, TunerError
from tuner.objective import TunerSample

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


#: At a thousand samples each, more than a proxy stores; the rest comes with the next poll.
MAX_PAGES = 100


class SampleSource(Protocol):
    """The part of `ProxyClient` that this module uses."""

    async def samples(self, after: int) -> SampleBatch: ...


@dataclass(frozen=True, slots=True)
class SampleBatchResult:
    """New samples of one run of the proxy; `lost` counts those that it no longer had.

    At the first contact with a run nothing is lost: nothing of it has been measured yet. `unreadable` has the errors of
    invalid rows, which count as missing too. `reason` is why another `boot_id` begins, other than a restart.
    """

    boot_id: str
    samples: tuple[TunerSample, ...]
    lost: int = 0
    unreadable: tuple[str, ...] = ()
    reason: str = ""


async def read_new(source: SampleSource, boot_id: str | None, after: int) -> list[SampleBatchResult]:
    """Return all samples after the cursor; two results if the proxy has restarted.

    Raises what `source` raises; the cursor has not moved then, so nothing is lost.
    """
    pager = _Pager(boot_id, after, resumed=boot_id is not None)
    pagers = [pager]
    for _ in range(MAX_PAGES):
        batch = await source.samples(pager.after)
        if pager.boot_id not in (None, batch.boot_id):  # the cursor was of an earlier run
            pager = _Pager(batch.boot_id, 0, resumed=False)
            pagers.append(pager)
        elif not pager.add(batch):
            break
    return [one.delivery() for one in pagers if one.boot_id is not None]


class _Pager:
    """The pages of one run."""

    def __init__(self, boot_id: str | None, after: int, *, resumed: bool) -> None:
        self.boot_id, self.after, self._resumed = boot_id, after, resumed
        self._samples: list[TunerSample] = []
        self._unreadable: list[str] = []
        self._lost = 0

    def add(self, batch: SampleBatch) -> bool:
        """Add a page; return whether there are more."""
        self.boot_id = batch.boot_id
        before = self.after
        for sample in batch.samples:
            seq = int(sample["seq"])
            if seq <= self.after:
                continue
            if self._resumed:
                self._lost += seq - self.after - 1
            self.after = seq
            try:
                self._samples.append(TunerSample.from_json(sample))
            except TunerError as error:
                self._unreadable.append(str(error))
        return before < self.after < batch.last_seq

    def delivery(self) -> SampleBatchResult:
        assert self.boot_id is not None, "a run has answered"
        return SampleBatchResult(self.boot_id, tuple(self._samples), self._lost, tuple(self._unreadable))
