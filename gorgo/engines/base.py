"""The interface of engine dialects: paths to probe and scrape, and readers of the answers.

Owns the protocol (`EngineDialect`), the rule of probes (`probe_paths`, `is_well`), and the detection of reports that a
replica does not make (`ReportWatch`). Readers are plain functions over text; the proxy makes the requests.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, ClassVar, Protocol, runtime_checkable

from gorgo.core.continuation import MESSAGES, Continuation
from gorgo.core.messages.request import EngineSample


@runtime_checkable
class EngineDialect(Protocol):
    """One kind of engine.

    `probe_path` is answered at once, without touching the scheduler: its round trip is the network's. `metrics_path`
    and `loads_path` are `None` where the engine has no such route. Both readers return the values that they
    find and `None` for the rest; they never raise for an unexpected text, because the next version of an engine will
    differ.

    `report_flags` has the engine's flag for each report that is off by default: `cached_tokens`, `metrics`.

    A dialect may also have `continuation`, which says how the engine goes on with an answer that broke off elsewhere.
    """

    name: ClassVar[str]
    probe_path: ClassVar[str]
    metrics_path: ClassVar[str | None]
    loads_path: ClassVar[str | None]
    report_flags: ClassVar[Mapping[str, str]]

    def read_metrics(self, text: str) -> EngineSample: ...

    def read_capacity(self, loads: object) -> EngineSample: ...


def continuation_of(engine: EngineDialect, route: str) -> Continuation | None:
    """Return how the engine goes on with an answer of a route that broke off; `None` if that is not known.

    Anthropic's messages have no flags: an engine that needs them is asked by a chat.

    >>> from gorgo.engines.registry import dialect
    >>> continuation_of(dialect("vllm"), "/v1/completions"), continuation_of(dialect("openai"), "/v1/completions")
    (<Continuation.FLAGS: 'flags'>, None)
    """
    found: Continuation | None = getattr(engine, "continuation", None)
    return Continuation.AS_CHAT if route == MESSAGES and found is Continuation.FLAGS else found


#: The route by which all engines that go on with an answer count tokens.
TOKENIZE_PATH = "/tokenize"
#: A text of a message, and white space behind it that a template may trim.
_LETTER = "a"


def tokenize_body(model: str | None, text: str) -> bytes:
    """Return the request for the tokens of a text; each engine reads the members that it knows."""
    named = {} if model is None else {"model": model}
    plain = {"prompt": text, "add_special_tokens": False, "content": text, "add_special": False}
    return json.dumps(named | plain).encode()


def template_body(model: str | None, space: str) -> bytes:
    """Return the request for the tokens of a chat whose last message ends with `space` and is to be gone on with.

    Where they are those of the chat without it, the template of the model trims its messages.
    """
    named = {} if model is None else {"model": model}
    messages = [{"role": "user", "content": _LETTER}, {"role": "assistant", "content": _LETTER + space}]
    flags = {"continue_final_message": True, "add_generation_prompt": False}
    return json.dumps({**named, "messages": messages, **flags}).encode()


def read_tokens(status: int, answer: bytes) -> list[Any] | None:
    """Return the tokens of an answer to either; `None` if the engine has no such route, or another one.

    >>> read_tokens(200, b'{"tokens": [5, 7]}'), read_tokens(404, b"{}")
    ([5, 7], None)
    """
    try:
        found = json.loads(answer) if status == 200 else None
    except (ValueError, RecursionError):
        return None
    tokens = found.get("tokens") if isinstance(found, dict) else None
    return tokens if isinstance(tokens, list) else None


def merged(first: EngineSample, second: EngineSample) -> EngineSample:
    """`first`, with its gaps filled from `second`."""
    return EngineSample(
        running_requests=_either(first.running_requests, second.running_requests),
        queued_requests=_either(first.queued_requests, second.queued_requests),
        used_tokens=_either(first.used_tokens, second.used_tokens),
        kv_capacity_tokens=_either(first.kv_capacity_tokens, second.kv_capacity_tokens),
        max_running_requests=_either(first.max_running_requests, second.max_running_requests),
        prefill_tokens_total=_either(first.prefill_tokens_total, second.prefill_tokens_total),
        prefill_busy_s_total=_either(first.prefill_busy_s_total, second.prefill_busy_s_total),
        prompt_tokens_total=_either(first.prompt_tokens_total, second.prompt_tokens_total),
    )


def _either(first: float | None, second: float | None) -> float | None:
    return second if first is None else first


# The paths of a probe and its answer. One rule for the probes of the proxy and for `gorgo check --live`.


_MODELS = "/v1/models"


def probe_paths(engine: EngineDialect) -> tuple[str, str]:
    """Return the engine's own path, then one for servers and gateways that answer it with 404 or 405.

    >>> from gorgo.engines.registry import dialect
    >>> probe_paths(dialect("sglang")), probe_paths(dialect("openai"))
    (('/ping', '/v1/models'), ('/v1/models', '/health'))
    """
    return engine.probe_path, "/health" if engine.probe_path == _MODELS else _MODELS


def is_well(status: int) -> bool:
    """Return whether a probe's answer means that the replica is well.

    Only 2xx: a server that refuses a probe, redirects it or has no such route is no engine that can serve.
    """
    return 200 <= status < 300


# Reports that a replica does not make, and the flag of the engine that turns each on.
#
# Owns the detection; each missing report is returned once. The proxy passes answers and scrapes in, and logs the
# result. Without `cached_tokens` the estimate of the prefix index is never checked; without metrics the Router knows
# its own load only.
#
# Theory of operation: an unreachable engine says nothing about its reports, so only an HTTP answer counts for metrics.
# Some versions omit `cached_tokens` if nothing was cached, so only answers with an expected cache hit count, and
# several in a row.


#: Answers in a row that lack an expected report of cached tokens: one may be a wrong estimate, five are a setting.
_SILENT_ANSWERS = 5


class Report(Enum):
    """Reports that an engine can make."""

    CACHED_TOKENS = "cached_tokens"
    METRICS = "metrics"


class ReportState(Enum):
    """`UNKNOWN` until something was seen; plain OpenAI's metrics stay so, because nothing is expected of them."""

    UNKNOWN = "unknown"
    REPORTED = "reported"
    MISSING = "missing"


_COST = {
    Report.CACHED_TOKENS: "the router's estimate of that cache cannot be checked",
    Report.METRICS: "the router knows only the load that it sends there itself",
}


@dataclass(frozen=True, slots=True)
class MissingReport:
    """A missing report; returned once per replica and report."""

    report: Report
    engine: str
    #: The engine's own flag; `None` where it has none.
    flag: str | None

    @property
    def advice(self) -> str:
        """One sentence for the operator."""
        remedy = f"start the engine with {self.flag}" if self.flag else "this kind of engine has no flag for it"
        return f"{self.engine} does not report {self.report.value}: {_COST[self.report]}; {remedy}"


@dataclass(slots=True)
class ReportWatch:
    """The reports of one replica.

    Each method returns a `MissingReport` when a report is first found missing, else `None`. `states` follows the
    current behaviour: a restart with the flag clears it.

    Example
    -------
    >>> from gorgo.engines.registry import dialect
    >>> watch = ReportWatch(dialect("sglang"))
    >>> watch.on_scrape(404, None).flag
    '--enable-metrics'
    >>> watch.on_scrape(404, None) is None
    True
    """

    dialect: EngineDialect
    states: dict[Report, ReportState] = field(default_factory=lambda: dict.fromkeys(Report, ReportState.UNKNOWN))
    _silent: int = 0
    #: That state, for most answers: to hash a key takes longer.
    _reports_cached: bool = False
    _said: set[Report] = field(default_factory=set)

    def on_answer(self, *, cached_tokens: int | None, estimated_tokens: float) -> MissingReport | None:
        """Record an answer with usage; `estimated_tokens` of its prompt were estimated as cached."""
        if cached_tokens is not None:
            self._silent = 0
            if self._reports_cached:
                return None
            self._reports_cached = True
            return self._set(Report.CACHED_TOKENS, ReportState.REPORTED)
        self._silent += estimated_tokens > 0
        missing = self._silent >= _SILENT_ANSWERS
        if missing:
            self._reports_cached = False
        return self._set(Report.CACHED_TOKENS, ReportState.MISSING) if missing else None

    def on_scrape(self, status: int | None, sample: EngineSample | None) -> MissingReport | None:
        """Record a scrape of `metrics_path`: its HTTP status (`None`: no answer) and the values read."""
        if self.dialect.metrics_path is None or status is None or status in _PASSING:
            return None
        known = status == 200 and sample is not None and sample.running_requests is not None
        return self._set(Report.METRICS, ReportState.REPORTED if known else ReportState.MISSING)

    def _set(self, report: Report, state: ReportState) -> MissingReport | None:
        self.states[report] = state
        if state is not ReportState.MISSING or report in self._said:
            return None
        self._said.add(report)
        return MissingReport(report, self.dialect.name, self.dialect.report_flags.get(report.value))

    def as_dict(self) -> Mapping[str, str]:
        """For `/admin/fleet`."""
        return {report.value: state.value for report, state in self.states.items()}


#: Says that the engine is busy, starting or broken, not that it has no metrics.
_PASSING = frozenset({408, 429, 500, 502, 503, 504})
