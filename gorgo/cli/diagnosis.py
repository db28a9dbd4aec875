"""Which silent fault a fleet has: plain functions from observed facts to findings, each with its evidence and remedy.

Owns what counts as a fault, and the order of findings. Leaves the facts to `gorgo.cli.evidence`, and their gathering
to `gorgo.cli.diagnose`.

Theory of operation. A fact that was not observed is `None`, and no rule finds a fault in it. Each rule stands for one
mechanism and yields a finding per place, or one for all places alike. A finding can explain others: a replica that
cannot be reached has no cache either. Such others are left out, so that the first line is what to mend first.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import inf
from statistics import median
from typing import TypeVar

from gorgo.cli.evidence import (
    Evidence,
    LoggedFacts,
    ReplicaFacts,
    RoutedReplica,
    SampleFacts,
)
from gorgo.formatting import age, share

_T = TypeVar("_T")
#: Severities, the worst first: requests suffer; they will, or are served worse than they could; for information.
SEVERITIES = ("bad", "warn", "note")


@dataclass(frozen=True, slots=True)
class Finding:
    """One silent fault.

    Parameters
    ----------
    severity:
        `bad`, `warn` or `note`; the last alone is no reason for an exit code.
    fault:
        A name that stays the same in later versions.
    place:
        The replica, client, model or key at fault; `router` or `fleet`.
    evidence, remedy:
        A sentence each.
    anchor:
        The section of the runbook.
    """

    severity: str
    fault: str
    place: str
    evidence: str
    remedy: str
    anchor: str


#: Every fault, with the section of the runbook that has more.
FAULTS: Mapping[str, str] = {
    "config-refused": "a-changed-regionsyaml-is-refused",
    "replica-unreachable": "a-replica-does-not-answer-as-configured",
    "key-refused": "a-replica-does-not-answer-as-configured",
    "url-wrong": "a-replica-does-not-answer-as-configured",
    "model-not-served": "a-replica-does-not-answer-as-configured",
    "wrong-engine-kind": "a-replica-does-not-answer-as-configured",
    "one-engine-twice": "a-replica-does-not-answer-as-configured",
    "several-addresses": "a-replica-does-not-answer-as-configured",
    "versions-differ": "a-replica-does-not-answer-as-configured",
    "contexts-differ": "a-replica-does-not-answer-as-configured",
    "region-wrong": "a-replica-does-not-answer-as-configured",
    "clock-off": "a-replica-does-not-answer-as-configured",
    "certificate-expires": "a-certificate-or-a-key-changes",
    "stream-buffered": "p95-rises",
    "keep-alive-short": "p95-rises",
    "prompts-part-early": "p95-rises",
    "herd": "p95-rises",
    "prefix-caching-off": "the-cache-index-is-wrong",
    "cached-tokens-not-reported": "the-cache-index-is-wrong",
    "usage-not-requested": "the-cache-index-is-wrong",
    "template-differs": "the-cache-index-is-wrong",
    "tokenizer-differs": "the-cache-index-is-wrong",
    "kv-events-off": "the-cache-index-is-wrong",
    "kv-events-interface": "the-cache-index-is-wrong",
    "kv-events-unreachable": "the-cache-index-is-wrong",
    "kv-events-silent": "the-cache-index-is-wrong",
    "reports-unused": "the-cache-index-is-wrong",
    "block-sizes-differ": "the-cache-index-is-wrong",
    "salts-differ": "the-cache-index-is-wrong",
    "hash-seeds-differ": "the-cache-index-is-wrong",
    "scrapes-slow": "pings-or-scrapes-are-stale",
    "metrics-off": "pings-or-scrapes-are-stale",
    "prior-wrong": "one-replica-is-slow",
    "replica-slow": "one-replica-is-slow",
    "engine-restarts": "streams-break-off",
    "quota-sheds": "requests-are-shed",
    "client-retries": "requests-are-shed",
    "drain-forgotten": "requests-are-shed",
    "file-limit-low": "the-proxy-does-not-answer",
    "tuner-blind": "the-tuner-does-odd-things",
    "request-log-lost": "the-disk-is-full",
    "edit-waits": "a-changed-regionsyaml-is-refused",
}


def _finding(severity: str, fault: str, place: str, evidence: str, remedy: str) -> Finding:
    return Finding(severity, fault, place, evidence, remedy, FAULTS[fault])


def diagnose(evidence: Evidence) -> list[Finding]:
    """Return the findings, worst first, without those that another one explains."""
    findings = [finding for rule in RULES for finding in rule(evidence)]
    explained = {(finding.place, fault) for finding in findings for fault in _EXPLAINS.get(finding.fault, ())}
    fleet = {fault for finding in findings for fault in _EXPLAINS_ANYWHERE.get(finding.fault, ())}
    left = [one for one in findings if (one.place, one.fault) not in explained and one.fault not in fleet]
    return sorted(_merged(left), key=lambda finding: SEVERITIES.index(finding.severity))


def _merged(findings: Iterable[Finding]) -> Iterator[Finding]:
    """Yield one finding for all places of a fault that have the same remedy, with the evidence of the first."""
    alike: dict[tuple[str, str, str], list[Finding]] = {}
    for one in findings:
        alike.setdefault((one.severity, one.fault, one.remedy), []).append(one)
    for first, *others in alike.values():
        evidence = f"{first.place}: {first.evidence}; the others alike" if others else first.evidence
        yield replace(first, place=_named([first.place, *(one.place for one in others)]), evidence=evidence)


#: What a fault of a replica explains there, and what one explains at every place.
_EXPLAINS: Mapping[str, tuple[str, ...]] = {
    "replica-unreachable": ("metrics-off", "kv-events-unreachable", "kv-events-off", "model-not-served"),
    "wrong-engine-kind": ("metrics-off", "kv-events-off", "versions-differ"),
    "stream-buffered": ("replica-slow",),
    "prior-wrong": ("replica-slow",),
}
_EXPLAINS_ANYWHERE: Mapping[str, tuple[str, ...]] = {
    # Both names have one engine, so each sees the other's load and cache.
    "one-engine-twice": ("prior-wrong", "replica-slow", "region-wrong"),
    "config-refused": ("edit-waits",),
    "client-retries": ("quota-sheds",),
}


# -- replicas that do not answer as configured


def _refused(evidence: Evidence) -> Iterator[Finding]:
    if evidence.config_error is not None:
        yield _finding(
            "bad",
            "config-refused",
            "regions.yaml",
            f"`gorgo serve` refuses the file: {evidence.config_error}",
            "correct the place that the error names; the running router keeps the file before it",
        )
    elif evidence.router is not None and evidence.router.config_refused:
        yield _finding(
            "bad",
            "config-refused",
            "router",
            "the running router refused its newest regions.yaml, although the file here is valid",
            "read `config_refused` in its log; a variable or a file of its machine may be missing",
        )


def _unreachable(evidence: Evidence) -> Iterator[Finding]:
    for replica in evidence.replicas:
        if replica.error is None:
            continue
        remedy = replica.advice or "start it, or open the way to its port: routers send its share elsewhere meanwhile"
        fault = {401: "key-refused", 403: "key-refused", 404: "url-wrong", 405: "url-wrong"}.get(
            replica.status or 0, "replica-unreachable"
        )
        if replica.status is not None and 300 <= replica.status < 400:
            fault, remedy = "url-wrong", "write the address that it redirects to: redirects are not followed"
        yield _finding("bad", fault, replica.name, f"{replica.url}: {replica.error}", remedy)


def _models(evidence: Evidence) -> Iterator[Finding]:
    for replica in evidence.replicas:
        missing = [name for name in replica.configured_models if replica.models and name not in replica.models]
        if missing:
            yield _finding(
                "bad",
                "model-not-served",
                replica.name,
                f"regions.yaml has {_named(missing)}, and it lists {_named(replica.models)}",
                "write the names of its /v1/models, or start it with --served-model-name",
            )


def _kind(evidence: Evidence) -> Iterator[Finding]:
    for replica in evidence.replicas:
        engine = replica.found_engine
        if replica.engine in ("auto", "openai") or engine in (None, "openai", replica.engine):
            continue
        yield _finding(
            "bad",
            "wrong-engine-kind",
            replica.name,
            f"regions.yaml says engine: {replica.engine}, and it answers as {engine}: "
            "its load and its cache are not read",
            f"write engine: {engine}, or auto",
        )


def _twice(evidence: Evidence) -> Iterator[Finding]:
    """Yield replicas that are one engine: the second has the first one's prompt in its cache, and its counters."""
    remedy = "remove one of the two: its load counts twice, and its cache as two"
    for text in evidence.same_urls:
        yield _finding("bad", "one-engine-twice", text.partition(":")[0], text, remedy)
    for first, second in _names_of_one_engine(evidence):
        words = f"a new prompt that {first.name} had computed was in the cache of {second.name} already"
        yield _finding("bad", "one-engine-twice", f"{first.name}, {second.name}", words, remedy)


def _names_of_one_engine(evidence: Evidence) -> Iterator[tuple[ReplicaFacts, ReplicaFacts]]:
    probed = [replica for replica in evidence.replicas if replica.probe is not None and replica.probe.prompt_tokens]
    for number, second in enumerate(probed):
        same = [first for first in probed[:number] if first.url != second.url and _same_counters(first, second)]
        if same and _found_cached(second):
            yield same[0], second


def _found_cached(replica: ReplicaFacts) -> bool:
    """Return whether its cache had a prompt that was new to it, as much of it as it has of one that it computed."""
    probe = replica.probe
    if probe is None or probe.cached_tokens_cold is None or probe.prompt_tokens is None:
        return False
    usual = probe.prompt_tokens if probe.cached_tokens_warm is None else probe.cached_tokens_warm
    return probe.cached_tokens_cold >= max(0.5 * usual, 0.1 * probe.prompt_tokens)


def _same_counters(first: ReplicaFacts, second: ReplicaFacts) -> bool:
    one, other = first.prompt_tokens_total, second.prompt_tokens_total
    # Requests of others can be counted between the two readings.
    return one is None or other is None or min(one, other) >= 0.9 * max(one, other)


def _addresses(evidence: Evidence) -> Iterator[Finding]:
    for replica in evidence.replicas:
        if replica.addresses is not None:
            yield _finding(
                "warn",
                "several-addresses",
                replica.name,
                replica.addresses,
                "write a replica for each address, or a fleet source of kind dns",
            )


# -- time: certificates, clocks, connections

#: A renewal by ACME comes thirty days before the end; one that is not there after half of them has failed.
_RENEWED_S, _URGENT_S = 14 * 86_400.0, 3 * 86_400.0


def _certificates(evidence: Evidence) -> Iterator[Finding]:
    left = dict(evidence.router.certificates_left_s) if evidence.router is not None else {}
    left |= {
        replica.name: replica.certificate_left_s
        for replica in evidence.replicas
        if replica.certificate_left_s is not None
    }
    for name, seconds in left.items():
        if seconds < _RENEWED_S:
            state = "has expired" if seconds <= 0 else f"expires in {age(seconds)}"
            yield _finding(
                "bad" if seconds < _URGENT_S else "warn",
                "certificate-expires",
                name,
                f"its certificate {state}",
                "renew it; the router reads its own files again every 10 s",
            )


#: A `Date` has whole seconds, and its answer travels: a clock that is kept is well within.
_CLOCK_S = 5.0


def _clocks(evidence: Evidence) -> Iterator[Finding]:
    ahead_s = {
        replica.name: replica.clock_ahead_s for replica in evidence.replicas if replica.clock_ahead_s is not None
    }
    off = {name: ahead for name, ahead in ahead_s.items() if abs(ahead) > _CLOCK_S}
    if len(off) == len(ahead_s) >= 2 and max(off.values()) - min(off.values()) <= _CLOCK_S:
        ahead = median(off.values())
        words = f"all replicas agree, and this machine is {_off(-ahead)} them"
        yield _finding("warn", "clock-off", "router", words, _SET_CLOCK)
        return
    for name, ahead in off.items():
        words = f"its clock is {_off(ahead)} that of this machine"
        yield _finding("warn", "clock-off", name, words, _SET_CLOCK)


_SET_CLOCK = "let chrony or systemd-timesyncd set it: certificates, quotas and times of events are judged by it"


def _off(ahead_s: float) -> str:
    return f"{age(abs(ahead_s))} {'ahead of' if ahead_s > 0 else 'behind'}"


#: A new connection costs a round trip, with TLS two: below this nobody sees it.
_FAR_MS = 10.0


def _keep_alive(evidence: Evidence) -> Iterator[Finding]:
    if evidence.router is None:
        return
    rtt_ms = {replica.name: replica.rtt_ms for replica in evidence.router.replicas}
    for replica in evidence.replicas:
        gaps = gaps_s(evidence.router.samples, replica.name)
        far = (rtt_ms.get(replica.name) or 0.0) >= _FAR_MS or replica.url.startswith("https:")
        if replica.closes_idle_s is not None and far and gaps and replica.closes_idle_s < median(gaps):
            yield _finding(
                "warn",
                "keep-alive-short",
                replica.name,
                f"it closes an idle connection after {replica.closes_idle_s:.0f} s, and every other request comes more "
                f"than {median(gaps):.0f} s after the one before: each pays for a new connection",
                "raise its keep-alive (VLLM_HTTP_TIMEOUT_KEEP_ALIVE, keepalive_timeout) above the gaps",
            )


def gaps_s(samples: Sequence[SampleFacts], replica: str) -> list[float]:
    """Return the times between the requests of a replica, as they ended; empty for fewer than four of them."""
    ends = sorted(sample.finished_s for sample in samples if sample.replica == replica)
    gaps = [later - earlier for earlier, later in pairwise(ends)]
    return gaps if len(gaps) >= 3 else []


# -- caches

#: Of a prompt that the engine has just computed; its last block is computed again.
_CACHED_SHARE = 0.25


def _caching(evidence: Evidence) -> Iterator[Finding]:
    # An engine under two names has shown its cache; what is asked by one name can take the place of the other's prompt.
    proven = {replica.name for pair in _names_of_one_engine(evidence) for replica in pair}
    for replica in evidence.replicas:
        probe = replica.probe
        if probe is None or probe.answered < 2 or not probe.prompt_tokens:
            continue
        if probe.cached_tokens_warm is None:
            if replica.cached_flag is not None:
                yield _finding(
                    "warn",
                    "cached-tokens-not-reported",
                    replica.name,
                    "it does not say how much of a prompt it found in its cache: no estimate of it is ever checked",
                    f"start the engine with {replica.cached_flag}",
                )
        elif probe.cached_tokens_warm < _CACHED_SHARE * probe.prompt_tokens and replica.name not in proven:
            yield _finding(
                "bad",
                "prefix-caching-off",
                replica.name,
                f"of the same {probe.prompt_tokens:,} tokens again {probe.cached_tokens_warm:,} were in its cache",
                "turn prefix caching on (vLLM: no --no-enable-prefix-caching; SGLang: no --disable-radix-cache)",
            )


def _counts(evidence: Evidence) -> Iterator[Finding]:
    for replica in evidence.replicas:
        probe = replica.probe
        if probe is None or probe.counted_tokens is None or probe.prompt_tokens is None:
            continue
        if probe.counted_tokens == probe.prompt_tokens:
            continue
        counts = f"it counts {probe.prompt_tokens:,} tokens in a chat, and the router {probe.counted_tokens:,}"
        if probe.plain_tokens is not None and probe.plain_tokens == probe.counted_plain_tokens:
            yield _finding(
                "warn",
                "template-differs",
                replica.name,
                f"{counts}; as plain text both count {probe.plain_tokens:,}",
                "set models[].chat_template to the template that the engine uses (--chat-template)",
            )
        else:
            yield _finding(
                "warn",
                "tokenizer-differs",
                replica.name,
                counts,
                "set models[].tokenizer to the tokenizer.json that the engine has loaded",
            )


def _events(evidence: Evidence) -> Iterator[Finding]:
    with_events = [replica for replica in evidence.replicas if replica.kv.configured is not None]
    for replica in with_events:
        kv = replica.kv
        flag = f"start the engine with {kv.flag}" if kv.flag else "remove kv_events: this kind of engine has none"
        if kv.announced is False and kv.configured == "auto":
            yield _finding("warn", "kv-events-off", replica.name, "its engine says that it publishes no events", flag)
        elif kv.connect_error is not None:
            where = f"{kv.endpoint}: {kv.connect_error}"
            if kv.bound is not None:
                words = f"{where}; the engine publishes at {kv.bound}, which is another interface"
                remedy = "publish at tcp://*:PORT, so that other machines reach it"
                yield _finding("warn", "kv-events-interface", replica.name, words, remedy)
            else:
                remedy = "compare kv_events with the endpoint of the engine's --kv-events-config, and the firewall"
                yield _finding("warn", "kv-events-unreachable", replica.name, where, remedy)
        elif kv.endpoint is not None and not kv.messages and replica.probe is not None and replica.probe.answered:
            words = f"{kv.endpoint} is open, and no event came for a prompt that its engine computed"
            yield _finding("warn", "kv-events-silent", replica.name, words, f"{flag}; compare port and topic")
    if with_events and evidence.reads_events:
        served = {model for replica in with_events for model in replica.models}
        for replica in evidence.replicas:
            if replica.kv.configured is None and replica.error is None and served & set(replica.models):
                others = _named([each.name for each in with_events])
                words = f"{others} with the same model report their caches, and of this one only the history is known"
                yield _finding("warn", "kv-events-off", replica.name, words, "set kv_events: auto for it too")
    for text in evidence.unused_reports:
        yield _finding(
            "warn",
            "reports-unused",
            text.partition(":")[0],
            text,
            "set models[].tokenizer for each model, or a policy that reads reports",
        )


def _blocks(evidence: Evidence) -> Iterator[Finding]:
    """Yield what makes the same prompt other blocks on engines alike."""
    hashed = [replica for replica in evidence.replicas if replica.kv.first_hash is not None]
    kinds: dict[tuple[str | None, tuple[str, ...]], list[ReplicaFacts]] = defaultdict(list)
    for replica in hashed:
        kinds[replica.found_engine or replica.engine, replica.models].append(replica)
    for rows in kinds.values():
        for replica, usual in _differing(rows, lambda replica: replica.kv.block_tokens):
            words = f"its blocks have {replica.kv.block_tokens} tokens, and those of its siblings {usual}"
            remedy = "start all engines of a model with one --block-size (SGLang: --page-size)"
            yield _finding("warn", "block-sizes-differ", replica.name, words, remedy)
        for replica, other in _differing(rows, lambda replica: replica.kv.salt):
            words = (
                f"its blocks of the same request have the salt {replica.kv.salt!r}, and those of its siblings {other!r}"
            )
            remedy = "remove the salt that a proxy or a setting adds for one replica (cache_salt)"
            yield _finding("warn", "salts-differ", replica.name, words, remedy)
        alike = [
            replica
            for replica in rows
            if replica.kv.first_tokens == rows[0].kv.first_tokens and replica.kv.salt == rows[0].kv.salt
        ]
        alike = [replica for replica in alike if replica.kv.block_tokens == rows[0].kv.block_tokens]
        if len({replica.kv.first_hash for replica in alike}) == len(alike):
            continue  # each has drawn its own seed, as engines do by default
        for replica, usual in _differing(alike, lambda replica: replica.kv.first_hash):
            words = f"the same block has the hash {replica.kv.first_hash:x} there, and {usual:x} at its siblings"
            remedy = (
                "set one PYTHONHASHSEED for all engines; the router needs no equal hashes, but a KV store that "
                "several engines share does"
            )
            yield _finding("note", "hash-seeds-differ", replica.name, words, remedy)


def _differing(
    rows: Sequence[ReplicaFacts], value_of: Callable[[ReplicaFacts], _T]
) -> Iterator[tuple[ReplicaFacts, _T]]:
    """Yield the rows whose value is not the usual one of several, with the usual one; of two, the second."""
    values = [value_of(replica) for replica in rows]
    if len(rows) < 2 or len(set(values)) < 2:
        return
    usual = Counter(values).most_common(1)[0][0]
    yield from ((replica, usual) for replica, value in zip(rows, values, strict=True) if value != usual)


# -- what stands between

#: Eight tokens that come within it came together; none of them was late if the first came no later than that of one.
AT_ONCE_S, _LATE_S = 0.004, 0.03


def _buffered(evidence: Evidence) -> Iterator[Finding]:
    """Yield replicas whose tokens come together, as late as all of them take, or while those of siblings do not."""
    spreads = {
        replica.name: max(spread_s for _, spread_s in replica.probe.streams)
        for replica in evidence.replicas
        if replica.probe is not None and replica.probe.streams
    }
    for replica in evidence.replicas:
        probe = replica.probe
        if probe is None or not (replica.name in spreads or probe.has_length):
            continue
        siblings = [
            spreads[each.name]
            for each in evidence.replicas
            if each is not replica and each.name in spreads and each.models == replica.models
        ]
        # Once or twice is what a busy machine does too.
        together = len(probe.streams) > 2 and spreads[replica.name] < AT_ONCE_S
        late_s = min((late_s for late_s, _ in probe.streams), default=0.0)
        by_time = late_s > _LATE_S
        by_siblings = max(siblings, default=0.0) > _LATE_S
        if probe.has_length:
            words = "a stream came with a length, so that it was read whole"
        elif together and by_siblings:
            words = (
                f"eight tokens of a stream came together, and those of a sibling within {max(siblings) * 1e3:.0f} ms"
            )
        elif together and by_time:
            words = f"eight tokens came together, three times, {late_s * 1e3:.0f} ms later than one alone"
        else:
            continue
        remedy = "turn buffering off between (nginx: proxy_buffering off; others: flush events, no compression)"
        yield _finding("bad", "stream-buffered", replica.name, words, remedy)


def _versions(evidence: Evidence) -> Iterator[Finding]:
    kinds: dict[tuple[str | None, tuple[str, ...]], list[ReplicaFacts]] = defaultdict(list)
    for replica in evidence.replicas:
        if replica.version is not None:
            kinds[replica.found_engine, replica.models].append(replica)
    for rows in kinds.values():
        for replica, usual in _differing(rows, lambda replica: replica.version):
            words = f"{replica.found_engine} {replica.version} there, and {usual} at its siblings"
            yield _finding("warn", "versions-differ", replica.name, words, "roll out one version")
    contexts: dict[str, list[ReplicaFacts]] = defaultdict(list)
    for replica in evidence.replicas:
        for model in replica.context_tokens:
            contexts[model].append(replica)
    for model, rows in contexts.items():
        tokens_of = {replica.name: replica.context_tokens[model] for replica in rows}
        for replica, usual in _differing(rows, lambda replica, of=tokens_of: of[replica.name]):  # type: ignore[misc] # its default
            words = f"{model} takes {replica.context_tokens[model]:,} tokens there, and {usual:,} at its siblings"
            remedy = "start all engines of a model with one --max-model-len (SGLang: --context-length)"
            yield _finding("warn", "contexts-differ", replica.name, words, remedy)


def _scrapes(evidence: Evidence) -> Iterator[Finding]:
    for text in evidence.slow_scrapes:
        yield _finding(
            "warn",
            "scrapes-slow",
            "proxy.scrape_interval_s",
            text,
            "remove the key: by default scrapes are as frequent as the policy needs",
        )
    for replica in evidence.replicas:
        if replica.metrics_status is not None and replica.metrics_status >= 400:
            yield _finding(
                "warn",
                "metrics-off",
                replica.name,
                f"its /metrics answers {replica.metrics_status}: "
                "the router knows only the load that it sends there itself",
                f"start the engine with {replica.metrics_flag}"
                if replica.metrics_flag
                else "let the way there pass /metrics",
            )


# -- the traffic

#: Fewer requests are chance.
_ENOUGH = 20
#: Bytes of an own block of the prefix index, as `config.values.BLOCK_BYTES`; an engine's are of 64 bytes or more.
_BLOCK_BYTES = 256


def _heads(evidence: Evidence) -> Iterator[Finding]:
    for head in () if evidence.router is None else evidence.router.heads:
        if head.parted >= 3 and 2 * head.parted >= head.compared and head.at_byte < _BLOCK_BYTES:
            of = head.client or head.model or "all clients"
            yield _finding(
                "bad",
                "prompts-part-early",
                of,
                f"{head.parted} of {head.compared} prompts in a row part at byte {head.at_byte} of their text "
                "and go on with the same text behind it: "
                "a date or an id before what all share keeps it out of every cache",
                "put what changes behind the constant text, or into the user's message",
            )


#: Of requests, at one replica; and how much longer they wait than they would elsewhere.
_HERD_SHARE, _HERD_RATIO = 0.6, 2.0


def _herd(evidence: Evidence) -> Iterator[Finding]:
    """Yield a replica that takes most requests, where they wait longer than a prefill anew elsewhere would take."""
    router = evidence.router
    if router is None:
        return
    ready = {replica.name: replica for replica in router.replicas if replica.eligible}
    # A second replica could have been chosen for these.
    since_s = sorted(replica.ready_since_s for replica in ready.values())[1] if len(ready) > 1 else inf
    rows = [sample for sample in router.samples if sample.replica in ready and sample.ttft_s is not None]
    rows = [sample for sample in rows if sample.finished_s - (sample.ttft_s or 0.0) > since_s]
    if len(rows) < _ENOUGH:
        return
    (name, count), *_ = Counter(sample.replica for sample in rows).most_common(1)
    there = [sample for sample in rows if sample.replica == name]
    waited_s = median(sample.ttft_s or 0.0 for sample in there)
    tokens = median(sample.input_tokens for sample in there)
    others = [replica for other, replica in ready.items() if other != name and replica.ready_since_s <= since_s]
    best_s = min((replica.rtt_ms or 0.0) / 1e3 + tokens / max(replica.prefill_tokens_per_s, 1.0) for replica in others)
    if count >= max(_HERD_SHARE, 1.5 / len(ready)) * len(rows) and waited_s > max(_HERD_RATIO * best_s, 0.2):
        yield _finding(
            "bad",
            "herd",
            name,
            f"it got {count} of the last {len(rows)} requests, which waited {waited_s * 1e3:,.0f} ms (median) for a "
            f"first token; elsewhere a prefill of all {tokens:,.0f} tokens would have taken {best_s * 1e3:,.0f} ms",
            "use a policy that weighs the cache against the queue (gorgo-ms), or raise the weight of its queue",
        )


#: As the learned factor has it, which comes near a prior three times off after some tens of prompts, and by no noise.
_OFF = 2.5


def _speeds(evidence: Evidence) -> Iterator[Finding]:
    router = evidence.router
    if router is None:
        return
    facts = {replica.name: replica for replica in evidence.replicas}
    factors = {replica.name: replica.prefill_slowdown for replica in router.replicas if replica.attempts >= _ENOUGH}
    for replica in router.replicas:
        factor = factors.get(replica.name)
        if factor is not None and not 1 / _OFF < factor < _OFF:
            its_facts = facts.get(replica.name)
            alike = [factors[name] for name in _siblings(replica.name, facts) if name in factors]
            slower = "slower" if factor > 1 else "faster"
            times = factor if factor > 1 else 1 / factor
            if its_facts is not None and its_facts.has_prefill_prior and (not alike or _near(factor, median(alike))):
                yield _finding(
                    "warn",
                    "prior-wrong",
                    replica.name,
                    f"its prefills are {times:.1f} times {slower} than its prior says: each start begins with that",
                    f"set replicas[].capacity.prefill_tokens_per_s to {replica.prefill_tokens_per_s:,.0f}",
                )
            elif factor > 1:
                words = f"its prefills take {factor:.1f} times as long as was assumed of it"
                yield _finding("warn", "replica-slow", replica.name, words, _EXAMINE_IT)
        elif replica.attempts >= _ENOUGH and replica.decode_slowdown is not None and replica.decode_slowdown >= 1.5:
            words = f"it takes {replica.decode_slowdown:.1f} times as long per output token as the replicas like it"
            yield _finding("warn", "replica-slow", replica.name, words, _EXAMINE_IT)


_EXAMINE_IT = "look at its machine: a throttled or shared accelerator, foreign load, other flags than its siblings have"


def _siblings(name: str, facts: Mapping[str, ReplicaFacts]) -> list[str]:
    subject = facts.get(name)
    return [
        sibling.name
        for sibling in facts.values()
        if subject is not None
        and sibling.name != name
        and (sibling.models, sibling.accelerator) == (subject.models, subject.accelerator)
    ]


def _near(one: float, other: float) -> bool:
    return 0.5 < one / other < 2.0


def _regions(evidence: Evidence) -> Iterator[Finding]:
    """Yield replicas whose round trip is that of another region than their label says."""
    regions: dict[str, list[RoutedReplica]] = defaultdict(list)
    for replica in () if evidence.router is None else evidence.router.replicas:
        if replica.rtt_ms is not None:
            regions[replica.region].append(replica)
    for region, rows in regions.items():
        usual = min(replica.rtt_ms or 0.0 for replica in rows)
        for replica in rows:
            rtt_ms = replica.rtt_ms or 0.0
            if rtt_ms > 30 and rtt_ms > 5 * max(usual, 1.0):
                words = f"its round trip is {rtt_ms:.0f} ms, and {usual:.0f} ms within the same region {region}"
                remedy = "correct replicas[].region: regions decide where data may go, and what an outage takes"
                yield _finding("warn", "region-wrong", replica.name, words, remedy)


def _usage(evidence: Evidence) -> Iterator[Finding]:
    """Yield that answers have no counts although the engine would say them."""
    if evidence.router is None:
        return
    probed = [
        replica.name for replica in evidence.replicas if replica.probe is not None and replica.probe.prompt_tokens
    ]
    silent = [replica.name for replica in evidence.replicas if replica.name in probed and not replica.requests_usage]
    rows = [sample for sample in evidence.router.samples if sample.replica in silent and sample.status == 200]
    missing = sum(sample.output_tokens is None for sample in rows)
    if len(rows) >= _ENOUGH and 2 * missing > len(rows):
        yield _finding(
            "warn",
            "usage-not-requested",
            "fleet",
            f"{missing} of the last {len(rows)} answers had no counts of tokens, and the engines report them if asked",
            "set replicas[].request_usage: true; the extra event is removed for clients",
        )


# -- clients

#: Of requests that are refused for a client's own limits.
_SHED_SHARE = 0.01
_QUOTAS = ("client_concurrency", "client_rate", "client_tokens")


def _quotas(evidence: Evidence) -> Iterator[Finding]:
    router = evidence.router
    if router is None:
        return
    shed = sum(router.rejects.get(code, 0.0) for code in _QUOTAS)
    if shed >= 3 and shed > _SHED_SHARE * max(router.requests, 1.0):
        most = max(_QUOTAS, key=lambda code: router.rejects.get(code, 0.0))
        key = {"client_concurrency": "max_in_flight", "client_rate": "requests_per_minute"}.get(
            most, "tokens_per_minute"
        )
        whom = max(router.client_rejects, key=lambda name: router.client_rejects[name], default="clients")
        yield _finding(
            "warn",
            "quota-sheds",
            whom,
            f"{shed:,.0f} of {router.requests:,.0f} requests got 429 for a client's own limit, mostly {most}",
            f"raise clients.{key} or a rule of this client, if the fleet has room for it",
        )


#: So many copies of one prompt within so long are a loop, where most of them fail.
_COPIES, _LOOP_S = 10, 300.0


def _loops(evidence: Evidence) -> Iterator[Finding]:
    copies: dict[tuple[str | None, str | None, tuple[int, ...]], list[LoggedFacts]] = defaultdict(list)
    for entry in evidence.log or ():
        copies[entry.client, entry.model, entry.prompt].append(entry)
    for (client, model, _), rows in copies.items():
        failed = sum(entry.status >= 400 for entry in rows)
        span_s = rows[-1].received_s - rows[0].received_s
        if len(rows) >= _COPIES and 2 * failed > len(rows) and span_s < _LOOP_S * len(rows) / _COPIES:
            statuses = ", ".join(
                f"{count} x {status}" for status, count in Counter(r.status for r in rows).most_common(2)
            )
            yield _finding(
                "bad",
                "client-retries",
                client or model or "a client",
                f"one prompt came {len(rows)} times in {age(span_s)} and failed ({statuses}): a client tries it "
                "again and again",
                "have the client wait longer after each failure and give up; meanwhile bound it (clients.rules)",
            )


# -- the router itself


def _files(evidence: Evidence) -> Iterator[Finding]:
    router, most = evidence.router, evidence.max_in_flight
    if router is None or router.most_files is None or router.most_files <= 0:
        return
    # Two sockets per request; some more for listeners, logs and probes.
    needed = 2 * (most or 0) + 64
    used = (router.open_files or 0.0) / router.most_files
    if router.most_files < needed or used > 0.8:
        yield _finding(
            "bad" if used > 0.8 else "warn",
            "file-limit-low",
            "router",
            f"it may open {router.most_files:,.0f} files ({share(used)} are open), and limits.max_in_flight "
            f"({most or 0:,}) needs {needed:,}",
            "raise LimitNOFILE of its unit (ulimit -n), or lower limits.max_in_flight",
        )


def _tuner(evidence: Evidence) -> Iterator[Finding]:
    tuner, router = evidence.tuner, evidence.router
    if tuner is None:
        return
    blind = None
    if tuner.error is not None:
        blind = f"its metrics cannot be read: {tuner.error}"
    elif tuner.failed_polls >= 3 and tuner.failed_polls > 0.1 * tuner.polls:
        blind = f"{tuner.failed_polls:,.0f} of its {tuner.polls:,.0f} polls of the proxy failed"
    elif tuner.unreachable:
        blind = f"{tuner.unreachable:,.0f} of its proxies cannot be reached"
    elif tuner.lost_samples > 0.1 * max(tuner.samples, 1.0):
        blind = f"it lost {tuner.lost_samples:,.0f} samples and read {tuner.samples:,.0f}"
    elif router is not None and len(router.samples) >= _ENOUGH:
        unseen = sum(sample.ttft_s is None for sample in router.samples)
        if 2 * unseen > len(router.samples):
            blind = f"{unseen} of the last {len(router.samples)} answers had no first token to time"
    if blind is not None:
        remedy = "give it the admin address and the token of the router (GORGO_ADMIN_TOKEN), or stop it"
        yield _finding("warn", "tuner-blind", "tuner", blind, remedy)


#: A drain for maintenance takes less.
_FORGOTTEN_S = 3600.0
_RESTARTS = 3


def _operations(evidence: Evidence) -> Iterator[Finding]:
    router = evidence.router
    if router is None:
        return
    if router.log_lines_lost:
        words = f"{router.log_lines_lost:,.0f} lines of the request log were not written"
        remedy = "free the disk, or give the log a faster one"
        yield _finding("warn", "request-log-lost", "router", words, remedy)
    for replica in router.replicas:
        if replica.draining_for_s is not None and replica.draining_for_s > _FORGOTTEN_S and not replica.in_flight:
            words = f"it has been draining for {age(replica.draining_for_s)} with nothing in flight"
            remedy = f"`gorgo drain {replica.name} --undo`, or draining: false in regions.yaml"
            yield _finding("warn", "drain-forgotten", replica.name, words, remedy)
        if replica.restarts >= _RESTARTS and router.up_s / replica.restarts < _FORGOTTEN_S:
            words = f"its engine restarted {replica.restarts} times in {age(router.up_s)}: each time its cache is empty"
            remedy = "read the engine's log at these times; out of memory is usual (--gpu-memory-utilization)"
            yield _finding("bad", "engine-restarts", replica.name, words, remedy)
    for text in router.waiting:
        remedy = "restart the router, or `gorgo unfreeze`, as the text says"
        yield _finding("warn", "edit-waits", "regions.yaml", text, remedy)


#: In the order of causes: what stands first explains more.
RULES = (
    _refused,
    _unreachable,
    _models,
    _kind,
    _twice,
    _certificates,
    _buffered,
    _caching,
    _heads,
    _loops,
    _herd,
    _events,
    _counts,
    _blocks,
    _scrapes,
    _speeds,
    _regions,
    _clocks,
    _versions,
    _addresses,
    _keep_alive,
    _quotas,
    _usage,
    _files,
    _tuner,
    _operations,
)

#: Names in one sentence.
_NAMED = 4


def _named(names: Iterable[str]) -> str:
    listed = list(names)
    more = f" and {len(listed) - _NAMED} more" if len(listed) > _NAMED else ""
    return (", ".join(listed[:_NAMED]) or "nothing") + more
