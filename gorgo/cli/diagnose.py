"""`gorgo diagnose`: the facts of a fleet, gathered in a minute with few tokens, and the silent faults that they show.

Owns what is asked of whom, and its bounds. Leaves what the facts mean to `gorgo.cli.diagnosis`.

Theory of operation. All replicas get one prompt that is new to them, one after the other: an engine that has it
already is one of those before. Each gets it again, which shows its cache, and some get it once more for a stream of
several tokens, which shows what holds tokens back. The events of caches are listened to meanwhile. Everything else is
read: the file, the running router, its request log, the tuner's metrics.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import ssl
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import urlsplit

import httpx
import typer

from gorgo.cli import options
from gorgo.cli.diagnosis import AT_ONCE_S, Finding, gaps_s
from gorgo.cli.errors import FAILED
from gorgo.cli.evidence import (
    Evidence,
    HeadFacts,
    KvFacts,
    LoggedFacts,
    ProbeFacts,
    ReplicaFacts,
    RoutedReplica,
    RouterFacts,
    SampleFacts,
    TunerFacts,
)

if TYPE_CHECKING:
    from gorgo.cli.connectivity import Reached, ReplicaClients
    from gorgo.cli.validation import ValidConfig
    from gorgo.config.fleet import ReplicaConfig
    from gorgo.config.model import Config
    from gorgo.core.messages.kv_events import BlocksStored
    from gorgo.engines.discovery import ServedModel
    from gorgo.live.monitor.discovery import Discovered

#: Of the whole command; most of it waits for replicas in turn.
TIME_S, TOKENS = 60.0, 50
#: Of a stream that shows whether tokens come one by one, and of a second one where they did not.
_STREAM_TOKENS = 8
#: For one answer of one token: a prefill of `_PROMPT_BYTES` behind a queue.
_ANSWER_S = 10.0
#: Some 1,600 tokens: several blocks of any engine, and little for a replica that works.
_PROMPT_BYTES = 6_400
#: For a connection, an event of a block that was computed, and an idle connection at the most.
_CONNECT_S, _EVENT_S, _IDLE_S = 3.0, 3.0, 12.0
#: Events of one replica that are read, and the time between two looks at the end of it.
_EVENTS, _POLL_MS = 256, 100
#: The log of this time is read, and of that at most so many lines.
_LOG_S, _LOG_LINES = 3600.0, 200_000


def diagnose(
    config: options.Config = options.REGIONS_YAML,
    url: options.AdminUrl = options.ADMIN_URL,
    request_log: Annotated[
        Path | None, typer.Option(metavar="FILE", show_default=False, help="Request log of the router.")
    ] = None,
    tuner_url: Annotated[
        str | None,
        typer.Option(metavar="URL", show_default=False, help="Address of the tuner's metrics (`--metrics-bind`)."),
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Find silent faults of a fleet: what works, and is slower or blinder than it has to be.

    Reads regions.yaml, asks every replica (50 generated tokens in all, a minute at most), and reads the running router
    and the last hour of its request log where they are. Findings come worst first, each with its evidence, what to do,
    and its section of the runbook. The exit code is 1 with a finding that is bad or a warning.
    """
    from gorgo.cli.diagnosis import diagnose as find_faults

    started_s = time.monotonic()
    gathered = gather_evidence(config, url=url, request_log=request_log, tuner_url=tuner_url)
    findings = find_faults(gathered.evidence)
    took_s = time.monotonic() - started_s
    if as_json:
        took = {"replicas": len(gathered.evidence.replicas), "tokens": gathered.tokens, "seconds": round(took_s, 1)}
        rows = [asdict(finding) for finding in findings]
        options.print_json({"config": str(config), "findings": rows, "took": took, "unknown": gathered.unknown})
    else:
        typer.echo("\n".join(_lines(config, findings, gathered, took_s)))
    if any(finding.severity != "note" for finding in findings):
        raise typer.Exit(FAILED)


@dataclass(slots=True)
class Gathered:
    """The evidence, what it took, and what could not be seen."""

    evidence: Evidence
    tokens: int = 0
    unknown: list[str] = field(default_factory=list)


def _lines(config: Path, findings: Sequence[Finding], gathered: Gathered, took_s: float) -> Iterable[str]:
    from gorgo.formatting import counted

    cost = f"{counted(len(gathered.evidence.replicas), 'replica')}, {counted(gathered.tokens, 'token')} generated"
    summary = counted(len(findings), "finding") if findings else "no silent fault found"
    yield f"{config}: {summary}; {cost}, {took_s:.1f} s"
    for finding in findings:
        yield ""
        yield f"{finding.severity:4}  {finding.fault}: {finding.place}"
        yield f"      seen: {finding.evidence}"
        yield f"      do:   {finding.remedy}"
        yield f"      more: docs/runbook.md#{finding.anchor}"
    if gathered.unknown:
        yield ""
    for what in gathered.unknown:
        yield f"not known: {what}"


def gather_evidence(config: Path, *, url: str, request_log: Path | None, tuner_url: str | None) -> Gathered:
    """Return all facts; what cannot be read is named, and no fault."""
    from gorgo.cli.validation import Overrides, examine
    from gorgo.config.load import read_text
    from gorgo.errors import ConfigError

    text, token = read_text(config), options.admin_token()
    overrides = Overrides(environ=os.environ, admin_token=token, ports=False)
    try:
        _, valid = examine(text, source=config, overrides=overrides)
    except ConfigError as error:
        return Gathered(Evidence(config_error=" ".join(str(error).split())))
    assert valid is not None, "all variables are set, or it was refused"
    return asyncio.run(_Gathering(valid, url, token, request_log, tuner_url).run())


class _Gathering:
    """One run of the command."""

    def __init__(
        self, valid: ValidConfig, url: str, token: str | None, request_log: Path | None, tuner_url: str | None
    ) -> None:
        self._valid = valid
        self._config: Config = valid.config
        self._url, self._token = url, token
        self._request_log, self._tuner_url = request_log, tuner_url
        self._end_s = time.monotonic() + TIME_S
        self._gathered = Gathered(Evidence())

    async def run(self) -> Gathered:
        from gorgo.cli.connectivity import ReplicaClients, find_sources
        from gorgo.config.replica_advice import report_warnings, scrape_warnings, several_addresses, url_warnings
        from gorgo.policies.registry import make_shadow

        valid, missing = self._valid, self._gathered.unknown
        shadow = make_shadow(self._config.proxy.shadow_policy, valid.policy)
        policies = [valid.policy] if shadow is None else [valid.policy, shadow]
        sources = await find_sources(self._config, os.environ)
        replicas = sources.merged(self._config).replicas
        async with ReplicaClients(self._config.limits.connect_timeout_s) as clients:
            router, log, tuner, reached = await asyncio.gather(
                self._router(), asyncio.to_thread(self._log), self._tuner(), clients.reach_all(replicas, os.environ)
            )
            probing = _Probing(self._config, clients, self._end_s, missing)
            facts = await probing.facts(
                replicas,
                reached,
                addresses={answer.name: several_addresses(answer.addresses) for answer in reached},
                gaps={
                    replica.name: [] if router is None else gaps_s(router.samples, replica.name) for replica in replicas
                },
            )
        self._gathered.tokens = probing.tokens
        self._gathered.evidence = Evidence(
            replicas=tuple(facts),
            same_urls=tuple(text for text in url_warnings(replicas) if "is that of" in text),
            unused_reports=tuple(report_warnings(self._config, policies)),
            slow_scrapes=tuple(scrape_warnings(self._config.proxy.scrape_interval_s, policies)),
            reads_events=any(policy.index == "events" for policy in policies),
            max_in_flight=self._config.limits.max_in_flight,
            router=router,
            log=log,
            tuner=tuner,
        )
        return self._gathered

    # -- what is read

    async def _router(self) -> RouterFacts | None:
        headers = {} if self._token is None else {"authorization": f"Bearer {self._token}"}
        missing = self._gathered.unknown
        try:
            async with httpx.AsyncClient(timeout=_ANSWER_S, headers=headers, base_url=self._url) as client:
                status = await _json(client, "/admin/status")
                newest = await _json(client, "/admin/samples?limit=1")
                after = max(0, newest["last_seq"] - 1000)
                samples = await _json(client, f"/admin/samples?after={after}")
                metrics = await client.get("/metrics")
        except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError) as error:
            missing.append(f"the running router: {self._url}: {error or type(error).__name__}")
            return None
        try:
            return _router_facts(status, samples["samples"], metrics.text if metrics.status_code == 200 else "")
        except (LookupError, TypeError, AttributeError, ValueError) as error:
            missing.append(f"the running router: {self._url}: another version ({type(error).__name__}: {error})")
            return None

    def _log(self) -> tuple[LoggedFacts, ...] | None:
        from gorgo.errors import TraceError
        from gorgo.lab.request_log import read_logged_requests

        if self._request_log is None:
            self._gathered.unknown.append("the last hour's requests: no --request-log")
            return None
        try:
            rows = read_logged_requests(self._request_log)
        except TraceError as error:
            self._gathered.unknown.append(f"the last hour's requests: {error}")
            return None
        since_s = rows[-1].received_s - _LOG_S
        return tuple(
            LoggedFacts(
                received_s=entry.received_s,
                client=entry.client,
                model=entry.model,
                prompt=(entry.text_bytes, entry.input_tokens, *entry.hashes[-1:]),
                status=entry.status,
                replica=entry.replica,
            )
            for entry in rows[-_LOG_LINES:]
            if entry.received_s >= since_s
        )

    async def _tuner(self) -> TunerFacts | None:
        if self._tuner_url is None:
            return None
        try:
            async with httpx.AsyncClient(timeout=_CONNECT_S) as client:
                answer = await client.get(self._tuner_url.rstrip("/") + "/metrics")
                answer.raise_for_status()
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            return TunerFacts(error=str(error) or type(error).__name__)
        polls = _by_label(answer.text, "gorgo_tuner_polls_total", "result")
        return TunerFacts(
            polls=sum(polls.values()),
            failed_polls=polls.get("failed", 0.0),
            samples=_total(answer.text, "gorgo_tuner_samples_total"),
            lost_samples=_total(answer.text, "gorgo_tuner_lost_samples_total"),
            unreachable=_by_label(answer.text, "gorgo_tuner_proxies", "state").get("unreachable", 0.0),
        )


async def _json(client: httpx.AsyncClient, path: str) -> dict[str, Any]:
    answer = await client.get(path)
    answer.raise_for_status()
    parsed = answer.json()
    if not isinstance(parsed, dict):
        raise ValueError(f"{path} answered no object")
    return parsed


def _by_label(text: str, name: str, label: str) -> dict[str, float]:
    from gorgo.engines.exposition import read_series

    totals: dict[str, float] = {}
    for series in read_series(text, {name}).get(name, ()):
        value = series.labels.get(label, "")
        totals[value] = totals.get(value, 0.0) + series.value
    return totals


def _total(text: str, name: str) -> float:
    return sum(_by_label(text, name, "").values())


def _router_facts(status: Mapping[str, Any], samples: Sequence[Mapping[str, Any]], metrics: str) -> RouterFacts:
    lines = _by_label(metrics, "gorgo_request_log_lines_total", "result")
    expiries = _by_label(metrics, "gorgo_certificate_expiry_timestamp_seconds", "certificate")
    return RouterFacts(
        up_s=status["up_s"],
        replicas=tuple(_routed(replica, status) for replica in status["replicas"]),
        samples=tuple(
            SampleFacts(
                finished_s=sample["finished_s"],
                replica=sample["replica"],
                status=sample["status"],
                input_tokens=sample["input_tokens"],
                output_tokens=sample["output_tokens"],
                cached_tokens=sample["cached_tokens"],
                ttft_s=None if sample["ttft_ms"] is None else sample["ttft_ms"] / 1e3,
            )
            for sample in samples
        ),
        heads=tuple(HeadFacts(**head) for head in status.get("prompt_heads", ())),
        waiting=tuple(difference["text"] for difference in status["differences"] if difference["waits"]),
        config_refused=_total(metrics, "gorgo_config_reload_failed") > 0,
        requests=_total(metrics, "gorgo_requests_total"),
        rejects=_by_label(metrics, "gorgo_rejects_total", "reason"),
        client_rejects=_by_label(metrics, "gorgo_client_rejects_total", "client"),
        log_lines_lost=lines.get("failed", 0.0) + lines.get("dropped", 0.0),
        open_files=_total(metrics, "gorgo_process_open_fds") or None,
        most_files=_total(metrics, "gorgo_process_max_fds") or None,
        certificates_left_s={name: expiry_s - time.time() for name, expiry_s in expiries.items()},
    )


def _routed(replica: Mapping[str, Any], status: Mapping[str, Any]) -> RoutedReplica:
    for_s = status["up_s"] if replica["in_state_for_s"] is None else replica["in_state_for_s"]
    return RoutedReplica(
        name=replica["name"],
        region=replica["region"],
        eligible=replica["eligible"],
        ready_since_s=time.time() - for_s,
        draining_for_s=replica["in_state_for_s"] if replica["state"] == "draining" else None,
        rtt_ms=replica["rtt_ms"],
        attempts=replica["attempts"],
        restarts=replica["restarts"],
        in_flight=replica["in_flight_requests"],
        prefill_slowdown=replica["prefill_slowdown"],
        prefill_tokens_per_s=replica["prefill_tokens_per_s"],
        decode_slowdown=replica["decode_slowdown"],
        reports_unused=(replica.get("cache") or {}).get("unused"),
    )


# What the replicas are asked.


_JSON = {"content-type": "application/json", "accept-encoding": "identity"}


def _prompt(nonce: str, size: int) -> str:
    """Return a text that no engine has seen, of about so many bytes."""
    words = [f"{nonce}"]
    words += [f"{(number * 2654435761) % 99991:05d}" for number in range(size // 6)]
    return " ".join(words)


@dataclass(slots=True)
class _Answer:
    """One streamed answer."""

    prompt_tokens: int | None
    cached_tokens: int | None
    first_s: float
    last_s: float
    has_length: bool


def _is_at_once(answer: _Answer) -> bool:
    return answer.last_s - answer.first_s < AT_ONCE_S


def _probe_facts(cold: _Answer, warm: _Answer | str, streams: Sequence[_Answer], counts: ProbeFacts) -> ProbeFacts:
    first_s = None if isinstance(warm, str) else warm.first_s
    # The most of all repetitions: one that came beside another request may have found its place in the cache taken.
    again = [answer.cached_tokens for answer in (*(() if isinstance(warm, str) else (warm,)), *streams)]
    return replace(
        counts,
        prompt_tokens=cold.prompt_tokens,
        cached_tokens_cold=cold.cached_tokens,
        cached_tokens_warm=max((cached for cached in again if cached is not None), default=None),
        answered=1 if isinstance(warm, str) else 2,
        streams=tuple(
            (0.0 if first_s is None else answer.first_s - first_s, answer.last_s - answer.first_s) for answer in streams
        ),
        has_length=cold.has_length or any(answer.has_length for answer in streams),
        error=warm if isinstance(warm, str) else None,
    )


class _Probing:
    """The replicas, asked within the bounds of time and tokens."""

    def __init__(self, config: Config, clients: ReplicaClients, end_s: float, unknown: list[str]) -> None:
        self._config = config
        self._clients = clients
        self._end_s = end_s
        self._unknown = unknown
        self._prompt = _prompt(secrets.token_hex(8), _PROMPT_BYTES)
        #: When the last new prompt had been computed.
        self._computed_s = float("inf")
        self.tokens = 0

    async def facts(
        self,
        replicas: Sequence[ReplicaConfig],
        reached: Sequence[Reached],
        *,
        addresses: Mapping[str, str | None],
        gaps: Mapping[str, Sequence[float]],
    ) -> list[ReplicaFacts]:
        """Return the facts of each replica, in their order."""
        facts = await asyncio.gather(*map(self._described, replicas, reached))
        facts = [replace(replica_facts, addresses=addresses[replica_facts.name]) for replica_facts in facts]
        up = [
            (replica, replica_facts)
            for replica, replica_facts in zip(replicas, facts, strict=True)
            if replica_facts.error is None
        ]
        # Two answers of one token for each; of a larger fleet for some, drawn anew each time.
        if len(up) > TOKENS // 2:
            self._unknown.append(f"caches of {len(up) - TOKENS // 2} replicas: {TOKENS} tokens are for {TOKENS // 2}")
            up = sorted(up, key=lambda _: secrets.randbits(32))[: TOKENS // 2]
        names = [replica_facts.name for _, replica_facts in up]
        probes, events, idle = await asyncio.gather(
            self._probes(up),
            asyncio.gather(*(self._kv_events(*each) for each in up)),
            asyncio.gather(*(self._closes_idle(replica, gaps[replica.name]) for replica, _ in up)),
        )
        kv = _with_blocks(dict(zip(names, events, strict=True)))
        closes = dict(zip(names, idle, strict=True))
        counters = await asyncio.gather(*(self._total(*each) for each in up))
        totals = dict(zip(names, counters, strict=True))
        return [
            replace(
                replica_facts,
                probe=probes.get(replica_facts.name),
                kv=kv.get(replica_facts.name, replica_facts.kv),
                closes_idle_s=closes.get(replica_facts.name),
                prompt_tokens_total=totals.get(replica_facts.name),
            )
            for replica_facts in facts
        ]

    # -- one replica

    async def _described(self, replica: ReplicaConfig, reached: Reached) -> ReplicaFacts:
        from gorgo.config.values import AUTO
        from gorgo.engines.registry import dialect
        from gorgo.live.monitor.discovery import discover

        facts = ReplicaFacts(
            name=replica.name,
            region=replica.region,
            url=replica.url,
            engine=replica.engine,
            accelerator=replica.accelerator,
            configured_models=replica.models,
            error=reached.error,
            status=reached.status,
            has_prefill_prior=replica.capacity.prefill_tokens_per_s is not None,
            requests_usage=replica.request_usage,
        )
        if reached.error is not None:
            said, _, advice = reached.error.partition(": ") if reached.status is not None else (reached.error, "", "")
            return replace(facts, error=said, advice=advice or None)
        discovered: Discovered = await discover(lambda path: self._get_json(replica, path), identify=True)
        kind = discovered.engine.name if discovered.engine is not None else None
        kind_name = replica.engine if replica.engine != AUTO else kind or AUTO
        spoken = dialect(kind_name)
        metrics = None if spoken.metrics_path is None else await self._get(replica, spoken.metrics_path)
        ahead_s, left_s = await asyncio.gather(self._clock_ahead_s(replica), self._certificate_left_s(replica))
        models: tuple[ServedModel, ...] = discovered.models or ()
        return replace(
            facts,
            found_engine=kind,
            version=None if discovered.engine is None else discovered.engine.version,
            models=tuple(model.name for model in models),
            context_tokens={model.name: model.context_tokens for model in models if model.context_tokens is not None},
            metrics_status=None if metrics is None else metrics.status_code,
            metrics_flag=spoken.report_flags.get("metrics"),
            cached_flag=spoken.report_flags.get("cached_tokens"),
            clock_ahead_s=ahead_s,
            certificate_left_s=left_s,
        )

    async def _get(self, replica: ReplicaConfig, path: str) -> httpx.Response | None:
        try:
            return await self._clients.of(replica).get(replica.url.rstrip("/") + path, headers=_headers(replica))
        except httpx.HTTPError:
            return None

    async def _get_json(self, replica: ReplicaConfig, path: str) -> object:
        answer = await self._get(replica, path)
        try:
            return answer.json() if answer is not None and answer.status_code == 200 else None
        except (ValueError, RecursionError):
            return None

    async def _clock_ahead_s(self, replica: ReplicaConfig) -> float | None:
        before_s = time.time()
        answer = await self._get(replica, "/v1/models")
        try:
            date = None if answer is None else answer.headers.get("date")
            stamp_s = None if date is None else parsedate_to_datetime(date).timestamp()
        except ValueError:
            return None
        # The second that it names has passed by half on average.
        return None if stamp_s is None else stamp_s + 0.5 - (before_s + time.time()) / 2

    async def _certificate_left_s(self, replica: ReplicaConfig) -> float | None:
        if not replica.url.lower().startswith("https:"):
            return None
        try:
            async with self._connected(replica) as (_, writer):
                shown = writer.get_extra_info("peercert") or {}
        except (OSError, TimeoutError):
            return None
        expiry = shown.get("notAfter")
        return None if expiry is None else ssl.cert_time_to_seconds(expiry) - time.time()

    @asynccontextmanager
    async def _connected(
        self, replica: ReplicaConfig
    ) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        """A connection of its own to a replica. Raises `OSError` or `TimeoutError`."""
        from gorgo.live.http.tls import shared_tls, upstream_tls

        parts = urlsplit(replica.url)
        tls = None
        if parts.scheme == "https":
            tls = upstream_tls(replica, shared_tls(ssl.create_default_context()))
        port = parts.port or (443 if tls else 80)
        async with asyncio.timeout(_CONNECT_S):
            reader, writer = await asyncio.open_connection(parts.hostname, port, ssl=tls)
        try:
            yield reader, writer
        finally:
            writer.close()

    async def _closes_idle(self, replica: ReplicaConfig, gaps: Sequence[float]) -> float | None:
        """Return the time after which the replica closes an idle connection; `None` if it outlives a usual gap."""
        from statistics import median

        from gorgo.engines.base import probe_paths
        from gorgo.engines.registry import dialect

        wait_s = min(median(gaps) if gaps else 0.0, _IDLE_S, self._end_s - time.monotonic() - 1.0)
        if wait_s < 1.0:
            return None
        path = urlsplit(replica.url).path.rstrip("/") + probe_paths(dialect(replica.engine))[0]
        host = urlsplit(replica.url).netloc.rpartition("@")[2]
        lines = [
            f"GET {path} HTTP/1.1",
            f"host: {host}",
            *(f"{key}: {value}" for key, value in _headers(replica).items()),
        ]
        try:
            async with self._connected(replica) as (reader, writer):
                writer.write(("\r\n".join(lines) + "\r\n\r\n").encode())
                async with asyncio.timeout(_CONNECT_S):
                    await reader.read(65_536)
                started_s = time.monotonic()
                with suppress(TimeoutError):
                    async with asyncio.timeout(wait_s):
                        while await reader.read(65_536):
                            pass
                    return time.monotonic() - started_s
        except (OSError, TimeoutError):
            return None
        return None

    async def _total(self, replica: ReplicaConfig, facts: ReplicaFacts) -> float | None:
        from gorgo.engines.registry import dialect

        spoken = dialect(facts.found_engine or "openai")
        answer = None if spoken.metrics_path is None else await self._get(replica, spoken.metrics_path)
        if answer is None or answer.status_code != 200:
            return None
        return spoken.read_metrics(answer.text).prompt_tokens_total

    # -- generated tokens

    async def _probes(self, up: Sequence[tuple[ReplicaConfig, ReplicaFacts]]) -> dict[str, ProbeFacts]:
        # Subscriptions to events are open before the first block is computed.
        await asyncio.sleep(0.5 if any(replica.kv_events is not None for replica, _ in up) else 0)
        probes: dict[str, ProbeFacts] = {}
        cold: dict[str, _Answer] = {}
        for replica, facts in up:
            answer = await self._stream(replica, facts, 1)
            if isinstance(answer, str):
                probes[replica.name] = ProbeFacts(error=answer)
                self._unknown.append(f"the cache of {replica.name}: {answer}")
            else:
                cold[replica.name] = answer
        self._computed_s = time.monotonic()
        answered = [(replica, facts) for replica, facts in up if replica.name in cold]
        again = await asyncio.gather(*(self._stream(replica, facts, 1) for replica, facts in answered))
        warm = {replica.name: answer for (replica, _), answer in zip(answered, again, strict=True)}
        counts = await asyncio.gather(*(self._counts(*each, cold[each[0].name]) for each in answered))
        streams: dict[str, list[_Answer]] = {replica.name: [] for replica, _ in answered}
        await self._several(answered, streams, left=2 * _STREAM_TOKENS + 1)
        # Those whose tokens came at once, which a busy machine does too: twice more, and one token alone again.
        for _ in range(2):
            at_once = [
                each for each in answered if streams[each[0].name] and all(map(_is_at_once, streams[each[0].name]))
            ]
            await self._several(at_once, streams)
        for replica, facts in at_once:
            once_more = await self._stream(replica, facts, 1)
            before = warm[replica.name]
            if not isinstance(once_more, str) and not isinstance(before, str) and once_more.first_s > before.first_s:
                warm[replica.name] = replace(before, first_s=once_more.first_s)
        return probes | {
            replica.name: _probe_facts(cold[replica.name], warm[replica.name], streams[replica.name], count)
            for (replica, _), count in zip(answered, counts, strict=True)
        }

    async def _several(
        self,
        replicas: Sequence[tuple[ReplicaConfig, ReplicaFacts]],
        streams: Mapping[str, list[_Answer]],
        left: int = 0,
    ) -> None:
        """Add a stream of several tokens for as many replicas as there are tokens, with some `left`."""
        count = max(0, TOKENS - self.tokens - left) // _STREAM_TOKENS
        chosen = replicas[:count]
        answers = await asyncio.gather(*(self._stream(replica, facts, _STREAM_TOKENS) for replica, facts in chosen))
        for (replica, _), answer in zip(chosen, answers, strict=True):
            if not isinstance(answer, str):
                streams[replica.name].append(answer)
        if len(replicas) > count:
            self._unknown.append(f"streams of {len(replicas) - count} replicas: {TOKENS} tokens are generated in all")

    async def _counts(self, replica: ReplicaConfig, facts: ReplicaFacts, cold: _Answer) -> ProbeFacts:
        """Return how many tokens the engine and the router count, in the chat and, if they differ, as plain text."""
        counted = await self._counted("/v1/chat/completions", self._chat(facts, 1))
        plain: tuple[int | None, int | None] = (None, None)
        if counted is not None and counted != cold.prompt_tokens and self.tokens < TOKENS:
            plain = await self._plain(replica, facts)
        return ProbeFacts(counted_tokens=counted, plain_tokens=plain[0], counted_plain_tokens=plain[1])

    def _model(self, facts: ReplicaFacts) -> str | None:
        return next(iter([name for name in facts.configured_models if name in facts.models] or facts.models), None)

    def _chat(self, facts: ReplicaFacts, tokens: int) -> dict[str, Any]:
        context = min(facts.context_tokens.values(), default=8192)
        # Half of a small context, at a token per byte at worst.
        text = self._prompt[: max(64, min(_PROMPT_BYTES, context // 2))]
        body: dict[str, Any] = {"messages": [{"role": "user", "content": text}], "max_tokens": tokens}
        body |= {"stream": True, "stream_options": {"include_usage": True}, "temperature": 0}
        if facts.found_engine not in (None, "openai"):
            body["ignore_eos"] = True
        model = self._model(facts)
        return body if model is None else {"model": model, **body}

    async def _stream(self, replica: ReplicaConfig, facts: ReplicaFacts, tokens: int) -> _Answer | str:
        """Return the answer to the prompt of so many tokens, or why there is none."""
        from gorgo.core.stream import FirstTokenDetector, StreamState, UsageReader

        left_s = min(_ANSWER_S, self._end_s - time.monotonic())
        if left_s <= 0 or self.tokens + tokens > TOKENS:
            return "no time or tokens are left"
        self.tokens += tokens
        route = "/v1/chat/completions"
        url, started_s = replica.url.rstrip("/") + route, time.perf_counter()
        usage, first_s, last_s, failure = UsageReader(), None, 0.0, None
        try:
            async with asyncio.timeout(left_s):
                body = json.dumps(self._chat(facts, tokens)).encode()
                headers = _headers(replica) | _JSON
                async with self._clients.of(replica).stream(
                    "POST", url, content=body, headers=headers, timeout=_ANSWER_S
                ) as answer:
                    detector = FirstTokenDetector(route)
                    async for chunk in answer.aiter_raw():
                        now_s = time.perf_counter() - started_s
                        usage.feed(chunk)
                        if first_s is None and detector.feed(chunk) is StreamState.CONTENT:
                            first_s = now_s
                        # The last of the tokens, not the end of the stream, which may be held.
                        if b'"content":' in chunk or b'"text":' in chunk:
                            last_s = now_s
                    if answer.status_code != 200:
                        failure = f"a chat of one token was answered {answer.status_code}"
        except TimeoutError:
            return f"no answer within {left_s:.0f} s"
        except httpx.HTTPError as error:
            return str(error) or type(error).__name__
        if failure is not None or first_s is None:
            return failure or "its stream has no token"
        counts = usage.usage()
        return _Answer(
            None if counts is None else counts.prompt_tokens,
            None if counts is None else counts.cached_tokens,
            first_s,
            max(first_s, last_s),
            "content-length" in answer.headers,
        )

    async def _plain(self, replica: ReplicaConfig, facts: ReplicaFacts) -> tuple[int | None, int | None]:
        """Return how many tokens the engine and the router count of the prompt as plain text."""
        route, text = "/v1/completions", self._chat(facts, 1)["messages"][0]["content"]
        model = self._model(facts)
        body: dict[str, Any] = {} if model is None else {"model": model}
        body |= {"prompt": text, "max_tokens": 1}
        counted = await self._counted(route, body)
        self.tokens += 1
        try:
            url = replica.url.rstrip("/") + route
            answer = await self._clients.of(replica).post(url, json=body, headers=_headers(replica), timeout=_ANSWER_S)
            tokens = answer.json()["usage"]["prompt_tokens"]
        except (httpx.HTTPError, ValueError, LookupError, TypeError):
            return None, counted
        return (tokens if isinstance(tokens, int) else None), counted

    async def _counted(self, route: str, body: Mapping[str, Any]) -> int | None:
        """Return the tokens of a body as the router counts them; `None` for a model without a tokenizer."""
        from gorgo.config.router_settings import model_names
        from gorgo.config.values import BLOCK_BYTES
        from gorgo.core.prompt.fingerprint import Fingerprinter
        from gorgo.live.parsing.json_body import read_fields
        from gorgo.live.prompt_tokens import PromptTokens, read_tokenizers

        models = read_tokenizers(self._config.models)
        named = body.get("model")
        name = model_names(self._config).get(named, named) if isinstance(named, str) else None
        if name not in models:
            return None
        tokens = PromptTokens(models, lambda _: (), lambda _: None)
        try:
            fields = read_fields(route, json.dumps(body).encode(), Fingerprinter(key=0, block_bytes=BLOCK_BYTES))
            exact = await tokens.exact_prompt(route, fields, model=name, base=name)
        finally:
            tokens.close()
        return None if exact is None else exact.tokens

    # -- events of caches

    async def _kv_events(
        self, replica: ReplicaConfig, replica_facts: ReplicaFacts
    ) -> tuple[KvFacts, list[BlocksStored]]:
        """Return what came of the events of a replica until some time after its first answer."""
        from gorgo.engines.kv_sources import SGLANG_FLAG, SGLANG_PATHS, VLLM_FLAG, VLLM_PATH, read_sglang, read_vllm
        from gorgo.errors import MissingExtra
        from gorgo.live.kv_events.sockets import import_zmq

        if replica.kv_events is None:
            return replica_facts.kv, []
        host = urlsplit(replica.url).hostname or ""
        sources, flag, bound = None, None, None
        if replica_facts.found_engine == "sglang":
            flag = SGLANG_FLAG
            for path in SGLANG_PATHS:
                sources = sources or read_sglang(await self._get_json(replica, path), host=host)
        elif replica_facts.found_engine == "vllm":
            flag, answer = VLLM_FLAG, await self._get_json(replica, VLLM_PATH)
            sources, bound = read_vllm(answer, host=host), _bound_host(answer, host)
        given = replica.kv_events
        facts = KvFacts(
            configured=given.endpoint or "auto", announced=None if sources is None else bool(sources), flag=flag
        )
        endpoint = given.endpoint or (sources[0].endpoint if sources else None)
        if endpoint is None or given.mode == "bind":
            return facts, []
        topic = given.topic or (sources[0].topic if sources and given.endpoint is None else "")
        facts = replace(facts, endpoint=endpoint, bound=bound)
        try:
            zmq = import_zmq()
        except MissingExtra as error:
            self._unknown.append(f"KV events of {replica.name}: {error}")
            return facts, []
        refused = await _refused(endpoint)
        if refused is not None:
            return replace(facts, connect_error=refused), []
        with ExitStack() as stack:
            socket = zmq.asyncio.Context.instance().socket(zmq.SUB)
            stack.callback(socket.close, linger=0)
            socket.setsockopt(zmq.SUBSCRIBE, topic.encode())
            socket.connect(endpoint)
            messages, stored = await self._events(socket)
        return replace(facts, messages=messages), stored

    async def _events(self, socket: Any) -> tuple[int, list[BlocksStored]]:
        """Return the messages and the stored blocks of a socket, until some time after the last new prompt."""
        from gorgo.core.messages.kv_events import BlocksStored
        from gorgo.engines.kv_events import decode_message

        messages, stored = 0, list[BlocksStored]()
        while time.monotonic() < min(self._end_s, self._computed_s + _EVENT_S) and len(stored) < _EVENTS:
            if not await socket.poll(_POLL_MS):
                if stored and self._computed_s < time.monotonic():
                    break
                continue
            frames = await socket.recv_multipart()
            messages += 1
            with suppress(ValueError, IndexError):
                events = decode_message(frames[-1]).events
                stored += [event for event in events if isinstance(event, BlocksStored) and event.block_tokens]
        return messages, stored


def _with_blocks(
    kv: Mapping[str, tuple[KvFacts, list[BlocksStored]]],
) -> dict[str, KvFacts]:
    """Return the facts with the block that most replicas have stored: that of the prompt that all of them got."""
    blocks = {
        name: {event.tokens[: 4 * (event.block_tokens or 0)]: event for event in events}
        for name, (_, events) in kv.items()
    }
    sizes = [len(tokens) for stored in blocks.values() for tokens in stored]
    least = min(sizes, default=0)
    counts = Counter(tokens[:least] for stored in blocks.values() for tokens in stored)
    common = counts.most_common(1)[0][0] if counts else b""
    result = {}
    for name, (facts, _) in kv.items():
        event = next((event for tokens, event in blocks[name].items() if tokens[:least] == common), None)
        if event is not None:
            first = event.hashes[0] if event.hashes else None
            facts = replace(facts, block_tokens=event.block_tokens, first_hash=first, salt=event.cache_salt)
            facts = replace(facts, first_tokens=event.tokens[:least])
        result[name] = facts
    return result


def _headers(replica: ReplicaConfig) -> dict[str, str]:
    from gorgo.live.replica_secrets import api_key

    key = api_key(replica, os.environ)
    return {} if key is None else {"authorization": f"Bearer {key}"}


def _bound_host(answer: object, host: str) -> str | None:
    """Return the endpoint of an answer of vLLM if it is of one interface that is not that of the replica's URL."""
    configs = answer.values() if isinstance(answer, dict) else ()
    for kv_config in configs:
        endpoint = kv_config.get("endpoint") if isinstance(kv_config, dict) else None
        if isinstance(endpoint, str) and endpoint.startswith("tcp://"):
            bound = endpoint.removeprefix("tcp://").rpartition(":")[0].strip("[]")
            if bound not in ("*", "0.0.0.0", "::", host):
                return endpoint
    return None


async def _refused(endpoint: str) -> str | None:
    """Return why no connection to a socket of ZeroMQ opens; `None` if one does, and for what is no TCP."""
    if not endpoint.startswith("tcp://"):
        return None
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    try:
        async with asyncio.timeout(_CONNECT_S):
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    except (OSError, ValueError, TimeoutError) as error:
        return str(error) or f"no connection within {_CONNECT_S:.0f} s"
    writer.close()
    return None
