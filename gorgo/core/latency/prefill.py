"""How long a prefill takes by what is known of a replica beforehand: P(u, c) of the cost in milliseconds.

Owns the formula, the same for one replica and for columns of them, and the priors. What experience adds is a factor,
`core.latency.prefill_speed`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

#: A number, or a column of them.
Value = TypeVar("Value", float, NDArray[np.float64])


@dataclass(frozen=True, slots=True)
class PrefillPrior:
    """Constant, linear and quadratic (attention) part of a prefill.

    Parameters
    ----------
    base_s:
        Of any prefill, s.
    tokens_per_s:
        Linear rate.
    kappa_s:
        Per pair of a new token and one that it attends to, s.
    known:
        Whether it was configured. The defaults are those of one GPU and model (2x L40S, Qwen3.5-35B-A3B FP8) and any
        other engine may differ from them by a factor, so what is learned outweighs them ten times sooner.

    Example
    -------
    >>> round(PrefillPrior().seconds(11_500.0, 0.0), 3)
    1.118
    """

    base_s: float = 0.012
    tokens_per_s: float = 11_500.0
    kappa_s: float = 1.6e-9
    known: bool = False

    @classmethod
    def of(cls, base_s: float | None, tokens_per_s: float | None, kappa_s: float | None) -> PrefillPrior:
        """Defaults where nothing is given. The rate is what makes a prior: it is nearly all of the time."""
        default = cls()
        return cls(
            default.base_s if base_s is None else base_s,
            default.tokens_per_s if tokens_per_s is None else tokens_per_s,
            default.kappa_s if kappa_s is None else kappa_s,
            known=tokens_per_s is not None,
        )

    def seconds(self, new_tokens: float, cached_tokens: float) -> float:
        """P(u, c): time to prefill `new_tokens` behind `cached_tokens`."""
        return prefill_s(self.base_s, 1.0 / self.tokens_per_s, self.kappa_s, new_tokens, cached_tokens)


def prefill_s(base_s: Value, token_s: Value, kappa_s: Value, new_tokens: Value, cached_tokens: Value) -> Value:
    """base + u / rate + kappa * u * (c + u / 2), with `token_s` = 1 / rate."""
    return base_s + new_tokens * (token_s + kappa_s * (cached_tokens + new_tokens / 2))
