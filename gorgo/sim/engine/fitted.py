"""Constants of the engine that fits the GORGO paper's table 2, as `python -m experiments fit` found them.

Owns the numbers. The other constants of that profile are the estimates for the same GPUs and model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

#: What the authors set: their largest CUDA graph. Answers of a replay are not those of its trace, so none is hit.
FLAGS: Mapping[str, Any] = {"cuda_graph_max_batch": 20, "caches_output": False}
#: What the search found.
FITTED: Mapping[str, Any] = {
    "prefill_tokens_per_s": 21_000.0,
    "prefill_kappa_s": 2.8e-9,
    "decode_base_s": 0.0084,
    "decode_eager_s": 0.028,
    "hit_share": 0.35,
    "decode_moe_s": 0.0165,
    "prefill_base_s": 0.008044,
}
SOURCE = (
    "Prefill rate, base and attention, decode base, experts, the step without a CUDA graph and the share of a "
    "prefix that is found: fitted to whole windows of table 2 of the GORGO paper (April 5 and 7; April 6 is held "
    "out) by python -m experiments fit. They make up for each other in part: a faster prefill with fewer hits "
    "fits nearly as well. Largest graph: the authors' flag. KV pool: measured on the paper's fleet. The rest is "
    "estimated as for the profile of that name."
)
