"""Everything that the comparison claims, as targets.

Owns the list: which policies meet where, and by how much one has to be ahead. The settings:

- ART-Chat-like windows of three days (a seed has one of the days), drawn by seed, with the paper's filters;
- the first 7,000 requests of Mooncake's conversation trace, where its file is there;
- a WildChat-like window, at a load at which nothing queues.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from gorgo.apps.demo.options import PUBLISHED
from gorgo.apps.laboratory.setting import Setting
from gorgo.apps.laboratory.target import Target
from gorgo.apps.simulate import ORACLE
from gorgo.apps.traces import TraceFilters

OURS, PAPER, RANDOM = "gorgo-ms", "gorgo", "random"
#: The paper's four.
BASELINES = tuple(name for name in PUBLISHED if name not in (PAPER, RANDOM))

#: The paper drops longer prompts and caps answers.
FILTERS = TraceFilters(max_input=24_000, max_output=128)
ART_CHAT = Setting(name="ART-Chat-like", traces=("art-chat-apr5", "art-chat-apr6", "art-chat-apr7"), filters=FILTERS)
ART_CHAT_LOADS = (3.0, 2.0, 1.25, 1.0)
#: Its clock is 3 s coarse: requests of one stamp are scattered over that.
CONVERSATION_FILTERS = TraceFilters(max_input=24_000, max_output=128, limit=7_000, spread_s=3.0)
CONVERSATION_LOADS = (3.0, 2.0, 1.25)
#: Where scenarios and wrong priors are tried: half load, so that what goes wrong has room to be routed around.
SCENARIOS_AT = ART_CHAT.at(2.0)
SCENARIOS = ("slow-replica", "rtt-shift", "mixed-fleet", "six-replicas")
#: Its first ten minutes at a third of the load: prefills take a tenth of each engine's time and seldom meet, so that
#: what is left to win is the round trip.
WILDCHAT = Setting(
    name="WildChat-like",
    traces=("wildchat-like",),
    filters=TraceFilters(max_input=24_000, max_output=128, limit=7_000),
    time_scale=3.0,
)
#: The paper's held-out windows and loads.
HELD_OUT = (
    Setting(name="April 6 like", traces=("art-chat-apr6",), filters=FILTERS, time_scale=2.0),
    Setting(name="April 7 like", traces=("art-chat-apr7",), filters=FILTERS, time_scale=3.0),
)
#: By this much the paper's policy is ahead of the best baseline, at the least.
PAPERS_CLAIM = 0.96


def all_targets(conversation: str | None) -> list[Target]:
    """Every target, in the order of the table; those of the conversation trace only with its file."""
    art_chat = [ART_CHAT.at(load) for load in ART_CHAT_LOADS]
    settings = [*art_chat, *_conversation(conversation)]
    return [
        *_baselines(art_chat),
        *_published(settings),
        *_oracle(settings),
        *_scenarios(),
        *_wildchat(),
        *_priors(),
        *_paper(),
    ]


def groups() -> list[str]:
    """What `--only` can name, in the order of the table."""
    return list(dict.fromkeys(target.group for target in all_targets(None)))


def _conversation(file: str | None) -> Iterable[Setting]:
    if file is None:
        return ()
    trace = Setting(name="conversation trace", traces=(file,), filters=CONVERSATION_FILTERS)
    return [trace.at(load) for load in CONVERSATION_LOADS]


def _against(group: str, settings: Sequence[Setting], others: Sequence[str], **at_most: float) -> Iterator[Target]:
    """Ours on each of the settings; `at_most` by figure, `p95_ttft` for p95 TTFT."""
    for word, limit in at_most.items():
        for setting in settings:
            yield _one(group, (setting,), others, word, limit)


def _one(group: str, settings: Sequence[Setting], others: Sequence[str], word: str, limit: float) -> Target:
    quantile, measure = word.split("_")
    figure = f"{quantile} {measure.upper()}"
    return Target(group=group, policy=OURS, settings=settings, others=others, figure=figure, at_most=limit)


def _baselines(settings: Sequence[Setting]) -> Iterator[Target]:
    low = [setting for setting in settings if setting.time_scale > 1.25]
    high = [setting for setting in settings if setting.time_scale <= 1.25]
    yield from _against("baselines", low, BASELINES, p95_ttft=0.90)
    yield from _against("baselines", high, BASELINES, p95_ttft=0.80)
    yield from _against("baselines", low, BASELINES, p95_e2e=1.0)
    yield from _against("baselines", high, BASELINES, p95_e2e=0.90)


def _published(settings: Sequence[Setting]) -> Iterator[Target]:
    """Each load and their geometric mean. Of p95 TTFT each load need only be lower."""
    for word, each, mean in (("p95_ttft", 1.0, 0.90), ("p50_ttft", 0.85, 0.85), ("p50_e2e", 1.03, 1.03)):
        yield from _against("published", settings, (PAPER,), **{word: each})
        yield _one("published", settings, (PAPER,), word, mean)


def _oracle(settings: Sequence[Setting]) -> Iterator[Target]:
    yield from _against("oracle", settings, (ORACLE,), p95_ttft=1.03, p95_e2e=1.03)


def _scenarios() -> Iterator[Target]:
    settings = [SCENARIOS_AT.under(name) for name in SCENARIOS]
    yield from _against("scenarios", settings, (ORACLE,), p95_ttft=1.06, p95_e2e=1.06)
    yield from _against("scenarios", settings[:1], (PAPER,), p95_e2e=1.05)


def _wildchat() -> Iterator[Target]:
    yield from _against("wildchat", [WILDCHAT], (RANDOM,), p95_ttft=0.85)


def _priors() -> Iterator[Target]:
    for scenario in ("priors-fast", "priors-slow"):
        yield Target(
            group="priors",
            policy=OURS,
            settings=(SCENARIOS_AT.under(scenario),),
            others=(OURS,),
            others_on=(SCENARIOS_AT,),
            figure="p95 TTFT",
            at_most=1.05,
        )


def _paper() -> Iterator[Target]:
    for setting in HELD_OUT:
        yield Target(
            group="paper",
            policy=PAPER,
            settings=(setting,),
            others=BASELINES,
            figure="p95 TTFT",
            at_most=PAPERS_CLAIM,
        )
