"""The candidates of one decision as numbers: what a log of decisions has of them, and what a model sees.

Owns which columns a log has, and the named features of a model with their formulas. `gorgo.live.telemetry.outcome_log`
writes the former, `gorgo.lab.decisions` reads them.

Theory of operation. A policy is a function of a request's sizes and the candidates' columns. A table with all columns
lets any such policy choose again, later and elsewhere, without a text. Times of the clock are stored as of the
decision, so that a table needs no clock: the candidates made of it are those at time 0. The features are one float32
table of the request and the replicas that could serve it. An unknown cell is filled as in a cost: the worst known one,
0 where none is known.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import partial
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from gorgo.core.fleet.replica import Columns, accelerator_code
from gorgo.core.latency.decode import SHARE
from gorgo.core.messages.request import RouteRequest
from gorgo.core.numeric import Floats
from gorgo.core.policy.interface import Candidates, fill_unknown
from gorgo.core.prefix.residency import SharedRuns
from gorgo.core.record import record
from gorgo.errors import ConfigError, closest

#: Cached tokens of the prompt there, which are of the request and no column of the fleet.
CACHED = "cached_tokens"
_FLEET = tuple(item.name for item in fields(Columns) if item.name != "salt")
#: Names of the columns, in the order of a table.
CANDIDATE_COLUMNS = (CACHED, *_FLEET)
#: Columns with a time of the clock.
_TIMES = ("sampled_s", "drained_at_s", "head_due_s", "head_began_s", "prefill_share_s", "sent_s")
_TIME_ROWS = np.array([CANDIDATE_COLUMNS.index(name) for name in _TIMES])
#: The column with the sum of so many such times as the other one says.
_SUM, _COUNT = CANDIDATE_COLUMNS.index("first_tokens_s"), CANDIDATE_COLUMNS.index("decoding_requests")


@record
class CandidateTable:
    """What a policy saw of one decision.

    Parameters
    ----------
    cells:
        A row per column, a cell per candidate; NaN is unknown.
    prompt_tokens, body_bytes, streamed, slo_ttft_s, slo_tpot_s:
        Of the request.
    waited_s:
        From its arrival to the decision.
    found_share, shared:
        As in `Candidates`.
    """

    cells: Floats
    prompt_tokens: int
    body_bytes: int
    streamed: bool
    waited_s: float
    found_share: float
    shared: SharedRuns | None = None
    slo_ttft_s: float | None = None
    slo_tpot_s: float | None = None

    @classmethod
    def of(cls, request: RouteRequest, candidates: Candidates) -> CandidateTable:
        """Return a copy: the fleet changes its columns in place."""
        cells = np.array([candidates.cached_tokens, *(getattr(candidates.table, name) for name in _FLEET)])
        cells[_TIME_ROWS] -= candidates.now
        cells[_SUM] -= cells[_COUNT] * candidates.now
        return cls(
            cells,
            request.prompt_tokens,
            request.body_bytes,
            request.streamed,
            candidates.now - request.received_s,
            candidates.found_share,
            candidates.shared,
            request.slo_ttft_s,
            request.slo_tpot_s,
        )

    def request(self, request_id: str) -> RouteRequest:
        """Return the request as far as it is known: its sizes, and nothing of its prompt."""
        return RouteRequest(
            request_id,
            -self.waited_s,
            self.prompt_tokens,
            b"",
            1.0,
            0,
            streamed=self.streamed,
            body_bytes=self.body_bytes,
            slo_ttft_s=self.slo_ttft_s,
            slo_tpot_s=self.slo_tpot_s,
        )

    def candidates(self, names: Sequence[str]) -> Candidates:
        """Return the candidates, at time 0. Their salts are 0: no policy by hash can choose among them."""
        columns = dict(zip(_FLEET, self.cells[1:], strict=True))
        return Candidates(
            np.arange(len(names)),
            tuple(names),
            Columns(**columns, salt=np.zeros(len(names), dtype=np.uint64)),
            self.cells[0],
            self.prompt_tokens,
            is_all=True,
            shared=self.shared,
            found_share=self.found_share,
        )


#: One value of the request for every row, or one per row.
Feature = Callable[[RouteRequest, Candidates], Floats | float]

#: Depth of a prefix group in blocks, as in Lodestar.
GROUP_BLOCKS = 10
_HASH_BYTES = 8
#: Prefix of a one-hot: 1 on replicas of that accelerator, else 0.
ACCELERATOR = "accelerator="


def _hit_share(_request: RouteRequest, candidates: Candidates) -> Floats:
    return candidates.cached_tokens / max(1, candidates.prompt_tokens)


def _decode_step_s(_request: RouteRequest, candidates: Candidates) -> Floats:
    decoding = fill_unknown(candidates.decoding_requests)
    step_s: Floats = fill_unknown(candidates.token_gap_s) * (1.0 + SHARE * decoding)
    return np.where(decoding > 0.0, step_s, 0.0)


def _kv_short_tokens(_request: RouteRequest, candidates: Candidates) -> Floats:
    free = candidates.kv_capacity_tokens - candidates.used_tokens
    needed = fill_unknown(candidates.uncached_prefill_tokens) + candidates.uncached_tokens
    return fill_unknown(np.maximum(needed - free, 0.0))


def _cell(name: str) -> Feature:
    return lambda _request, candidates: fill_unknown(getattr(candidates, name))


#: Feature -> formula. Tokens, requests and seconds unless said.
FEATURES: Mapping[str, Feature] = MappingProxyType(
    {
        # Of the request.
        "prompt_tokens": lambda _request, candidates: float(candidates.prompt_tokens),
        "body_bytes": lambda request, _candidates: float(request.body_bytes),
        # 1 for a stream, else 0: the time of an answer in one piece is that to its end.
        "streamed": lambda request, _candidates: float(request.streamed),
        # Of its prefix there; the share is 0 to 1, the quarter 0 to 3.
        "cached_tokens": _cell("cached_tokens"),
        "uncached_tokens": _cell("uncached_tokens"),
        "hit_share": _hit_share,
        "hit_quarter": lambda request, candidates: np.minimum(np.floor(4.0 * _hit_share(request, candidates)), 3.0),
        # Of the network.
        "rtt_s": _cell("rtt_s"),
        # Counted by the Router.
        "in_flight_requests": _cell("in_flight_requests"),
        "prefilling_requests": _cell("prefilling_requests"),
        "decoding_requests": _cell("decoding_requests"),
        "prefill_tokens": _cell("queued_prefill_tokens"),
        "uncached_prefill_tokens": _cell("uncached_prefill_tokens"),
        "decode_tokens": _cell("decode_tokens"),
        # A step of the engine as it decodes now, and tokens of KV memory that must be freed before this prompt's.
        "decode_step_s": _decode_step_s,
        "kv_short_tokens": _kv_short_tokens,
        # Scraped; usage is a share of the KV pool, `is_queued` 0 or 1.
        "running_requests": _cell("running_requests"),
        "queued_requests": _cell("queued_requests"),
        "is_queued": lambda _request, candidates: (fill_unknown(candidates.queued_requests) > 0.0).astype(np.float64),
        "kv_usage": _cell("kv_usage"),
        "scrape_age_s": _cell("scrape_age_s"),
        # Priors of a prefill, and the learned factor on them.
        "prefill_base_s": _cell("prefill_base_s"),
        "prefill_token_s": _cell("prefill_token_s"),
        "prefill_kappa_s": _cell("prefill_kappa_s"),
        "slowdown": _cell("slowdown"),
    }
)


def feature_table(names: Sequence[str], request: RouteRequest, candidates: Candidates) -> NDArray[np.float32]:
    """Return a row per candidate with a column per name, without an unknown cell.

    Raises `ConfigError` for a name that is no feature.
    """
    table = np.empty((len(candidates), len(names)), dtype=np.float32)
    for column, name in enumerate(names):
        table[:, column] = find_feature(name)(request, candidates)
    return table


def find_feature(name: str) -> Feature:
    """Return the formula of a feature. Raises `ConfigError` for a name that is none."""
    feature = FEATURES.get(name)
    if feature is not None:
        return feature
    if name.startswith(ACCELERATOR):
        return partial(_is_accelerator, accelerator_code(name.removeprefix(ACCELERATOR)))
    raise ConfigError(
        f"no feature named {name!r}{closest(name, FEATURES)}; there are: {', '.join(FEATURES)}, {ACCELERATOR}NAME"
    )


def _is_accelerator(code: float, _request: RouteRequest, candidates: Candidates) -> Floats:
    return np.equal(candidates.accelerator, code).astype(np.float64)


def prefix_group(request: RouteRequest, depth: int = GROUP_BLOCKS) -> int:
    """Return the signed 64-bit hash of the prompt's first `depth` full blocks, or of those it has; 0 without one."""
    blocks = request.blocks[: depth * _HASH_BYTES]
    return int.from_bytes(blocks[-_HASH_BYTES:], "little", signed=True)
