"""What gaps between tokens tell: the time of a decode step, and how many steps a prompt takes beside decodes.

With vLLM's scheduler a long prompt is computed in chunks that share their steps with decodes. A request that decodes
meanwhile has one long gap per step, so the long gaps count the steps, and steps of a known prompt tell the budget.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil
from statistics import median

from gorgo.apps.calibrate.fit import CHUNKS, DecodePoint
from gorgo.apps.calibrate.measured_engine import Answer

#: A gap is long if it exceeds a decode step by this share of what the longest gap does.
_LONG_SHARE = 0.12
#: The last chunk may be short. Below the first share of a whole one it makes no long gap, above the second it does.
_SHORT_CHUNKS = (0.05, 0.2)
#: Where the longest gap is below so many decode steps, noise could make it.
_LEAST_STALL = 3.0


@dataclass(frozen=True, slots=True)
class Stalls:
    """Steps in which a prompt was computed beside a decode."""

    new_tokens: int
    steps: int


def decode_point(answers: Sequence[Answer]) -> DecodePoint | None:
    """Return the median gap between the last first token and the first last one; None if a request failed.

    >>> two = [Answer(100, 0, (0.10, 0.12, 0.14, 0.16, 0.18, 0.20)), Answer(100, 99, (0.12, 0.14, 0.16, 0.18, 0.20))]
    >>> point = decode_point(two)
    >>> point.batch, point.context_tokens, round(point.step_s, 3)
    (2, 207, 0.02)
    """
    if any(answer.error is not None or len(answer.tokens_s) < 2 or not answer.prompt_tokens for answer in answers):
        return None
    start_s = max(answer.tokens_s[0] for answer in answers)
    end_s = min(answer.tokens_s[-1] for answer in answers)
    gaps, context = [], 0.0
    for answer in answers:
        inside = [(place, at) for place, at in enumerate(answer.tokens_s) if start_s <= at <= end_s]
        gaps += [after[1] - before[1] for before, after in pairwise(inside)]
        if inside:
            context += (answer.prompt_tokens or 0) + (inside[0][0] + inside[-1][0]) / 2 + 1
    return DecodePoint(len(answers), round(context), median(gaps)) if len(gaps) >= len(answers) else None


def stalls(decoding: Answer, prompt: Answer) -> Stalls | None:
    """Return in how many steps `prompt` was computed while `decoding` decoded; None where gaps do not show it.

    >>> decoding = Answer(30, 0, (0.01, 0.11, 0.21, 0.31, 0.32, 0.33, 0.34, 0.35))
    >>> stalls(decoding, Answer(1500, 0, (0.31,)))
    Stalls(new_tokens=1500, steps=3)
    """
    if decoding.error or prompt.error or not prompt.tokens_s or prompt.prompt_tokens is None:
        return None
    first_s = prompt.ttft_s
    times_s = [0.0, *decoding.tokens_s]
    gaps = [(after <= first_s, after - before) for before, after in pairwise(times_s)]
    meanwhile, later = [gap for inside, gap in gaps if inside], [gap for inside, gap in gaps if not inside]
    if not meanwhile or len(later) < 3:
        return None
    step_s, longest_s = median(later), max(meanwhile)
    if longest_s < _LEAST_STALL * step_s:
        return None
    least_s = step_s + _LONG_SHARE * (longest_s - step_s)
    return Stalls(prompt.prompt_tokens - (prompt.cached_tokens or 0), sum(gap >= least_s for gap in meanwhile))


def step_budget(measured: Sequence[Stalls]) -> int | None:
    """Return the common budget of a step that explains the counted steps best; None without any.

    A prompt of one step tells that the budget is not smaller: of budgets that explain all alike the largest counts.

    >>> step_budget([Stalls(5000, 10), Stalls(3000, 6)]), step_budget([Stalls(5000, 1)]), step_budget([])
    (512, 16384, None)
    """
    if not measured:
        return None

    def error(budget: int) -> int:
        return sum(_missed(one, one.new_tokens / budget) for one in measured)

    return min(sorted(CHUNKS, reverse=True), key=error)


def _missed(one: Stalls, chunks: float) -> int:
    """Return by how much the counted steps are not those of so many chunks; a short last one may be seen or not."""
    return min(abs(one.steps - max(1, ceil(chunks - short))) for short in _SHORT_CHUNKS)
