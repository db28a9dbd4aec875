"""The traffic of the published comparisons, as shapes.

Lodestar's synthetic traces share 10 to 80 % of each prompt and mix 1k to 8k tokens; its real ones are Mooncake's.
llm-d's scenarios are `num_groups` system prompts with `num_prompts_per_group` users in endless conversations. Groups of
this project are of unequal size (in proportion to 1/n), those of llm-d's generator of equal size.
"""

from __future__ import annotations

from dataclasses import replace

from gorgo.apps.datasets import shapes
from gorgo.apps.datasets.prefix_shapes import GroupsShape, Quantiles, SharingShape
from gorgo.apps.datasets.shape import read_shape
from gorgo.apps.learned_routers.traffic import Phase, Traffic

#: Prompt lengths of synthetic traffic: 1k to 8k tokens, evenly.
LENGTHS: Quantiles = ((0.0, 1000.0), (1.0, 8000.0))
#: Shares of a mixed workload.
MIXED = (0.1, 0.3, 0.5, 0.7)


def sharing_shape(share: float, lengths: Quantiles = LENGTHS) -> SharingShape:
    """Return prompts of which `share` is a prefix that ten requests use, forty others apart."""
    return SharingShape(
        seed=0,
        requests=1,
        rate_per_s=1.0,
        input_quantiles=lengths,
        shared_share=share,
        new_share=0.1,
        reuse_distance=40,
        shift_at=0,
        output_median=90,
        output_sigma=0.6,
        output_max=512,
        block_tokens=64,
    )


def sharing(share: float, *, requests: int, rate_per_s: float, output_tokens: int | None = None) -> Traffic:
    """Return one level of sharing."""
    phase = Phase(streams=(sharing_shape(share),), requests=requests, rates_per_s=(rate_per_s,))
    name = f"{share:.0%} shared" + (", prefill only" if output_tokens == 1 else "")
    return Traffic(name=name, phases=(phase,), output_tokens=output_tokens)


def mixed(*, requests: int, rate_per_s: float) -> Traffic:
    """Return four levels of sharing side by side."""
    streams = tuple(sharing_shape(share) for share in MIXED)
    return Traffic(name="mixed", phases=(Phase(streams=streams, requests=requests, rates_per_s=(rate_per_s,)),))


def shipped(name: str, *, requests: int, rate_per_s: float) -> Traffic:
    """Return a shipped shape of Mooncake's kind at another rate."""
    shape = read_shape(shapes()[name])
    assert isinstance(shape, SharingShape | GroupsShape)
    phase = Phase(streams=(shape,), requests=requests, rates_per_s=(rate_per_s,))
    return Traffic(name=name.removesuffix("-like"), phases=(phase,), block_tokens=shape.block_tokens)


def traced(name: str, file: str, *, requests: int, rate_per_s: float) -> Traffic:
    """Return a trace file at another rate."""
    return Traffic(name=name, phases=(Phase(streams=(file,), requests=requests, rates_per_s=(rate_per_s,)),))


def fixed_length(tokens: int, share: float, *, requests: int, rate_per_s: float) -> Traffic:
    """Return prompts of one length around `tokens`."""
    lengths = ((0.0, float(tokens)), (1.0, float(tokens)))
    phase = Phase(streams=(sharing_shape(share, lengths),), requests=requests, rates_per_s=(rate_per_s,))
    return Traffic(name=f"{tokens / 1000:g}k tokens, {share:.0%} shared", phases=(phase,))


def shift(*, requests: int, rates: tuple[float, float] = (10.0, 22.0)) -> Traffic:
    """Return 5 % of sharing, then 50 % at another rate, half of the requests each."""
    return Traffic(
        name="5 to 50 % shared",
        phases=tuple(
            Phase(streams=(sharing_shape(share),), requests=requests // 2, rates_per_s=(rate,))
            for share, rate in zip((0.05, 0.5), rates, strict=True)
        ),
    )


def longer(*, requests: int, rates: tuple[float, float]) -> Traffic:
    """Return prompts of 1k tokens, then of 8k, half of the requests each."""
    return Traffic(
        name="1k to 8k tokens",
        phases=tuple(
            Phase(
                streams=(sharing_shape(0.5, ((0.0, tokens), (1.0, tokens))),),
                requests=requests // 2,
                rates_per_s=(rate,),
            )
            for tokens, rate in zip((1000.0, 8000.0), rates, strict=True)
        ),
    )


_CHAT = GroupsShape(
    seed=0,
    duration_s=1.0,
    rate_per_s=1.0,
    groups=6,
    users=6000,
    system_median=1000,
    system_sigma=0.0,
    history_median=0,
    history_sigma=0.0,
    turns_mean=50.0,
    turn_median=30,
    turn_sigma=0.3,
    think_s_min=2.0,
    answer_token_s=0.06,
    output_median=1000,
    output_sigma=0.3,
    output_max=4096,
    input_max=28_000,
    block_tokens=64,
)
#: llm-d's scenarios: groups, users of each, tokens of a system prompt and of a question.
SCENARIOS = {
    "A": (6, 1000, 1000, 30),
    "B": (6, 1000, 1000, 3000),
    "C": (150, 5, 6000, 1200),
    "D": (150, 5, 1000, 6200),
}


def scenario(name: str, *, requests: int, rates_per_s: tuple[float, ...]) -> Traffic:
    """Return one of llm-d's scenarios, at one rate or in steps of equal time."""
    groups, users, system, question = SCENARIOS[name]
    shape = replace(_CHAT, groups=groups, users=groups * users, system_median=system, turn_median=question)
    phase = Phase(streams=(shape,), requests=requests, rates_per_s=rates_per_s)
    return Traffic(name=f"scenario {name}", phases=(phase,), max_input=28_000, with_outputs=True)


def sharegpt(*, requests: int, rate_per_s: float) -> Traffic:
    """Return short prompts without a common prefix, of about ShareGPT's lengths (220 and 200 tokens, assumed)."""
    shape = replace(_CHAT, groups=6000, users=6000, system_median=1, turn_median=130, turn_sigma=1.1, turns_mean=1.5)
    shape = replace(shape, output_median=150, output_sigma=0.9, output_max=1024)
    return Traffic(
        name="ShareGPT-like", phases=(Phase(streams=(shape,), requests=requests, rates_per_s=(rate_per_s,)),)
    )


def production(*, requests: int) -> Traffic:
    """Return llm-d's production traffic: stages of 1 and 5 requests a second, long tails of prompts and answers."""
    return _staged("production", requests, _PRODUCTION)


def production_of_long_turns(*, requests: int) -> Traffic:
    """Return the same stages with few long turns: baselines have first tokens after seconds, as in the published run.

    Lengths are chosen for that, and for the published end-to-end times of `load-prefix 3:2:2` over its time per token.
    """
    shape = replace(_PRODUCTION, system_median=4000, turn_median=4000, turn_sigma=1.2, turns_mean=1.3)
    return _staged("production of long turns", requests, replace(shape, output_median=330, output_sigma=0.5))


_PRODUCTION = replace(
    _CHAT,
    groups=6,
    users=300,
    turn_median=729,
    turn_sigma=1.6,
    output_median=300,
    output_sigma=1.3,
    output_max=8192,
    input_max=131_072,
    turns_mean=12.0,
)


def _staged(name: str, requests: int, shape: GroupsShape) -> Traffic:
    phase = Phase(streams=(shape,), requests=requests, rates_per_s=(1.0, 5.0) * 4)
    return Traffic(name=name, phases=(phase,), max_input=131_072, with_outputs=True)
