"""Every known difference from the authors' package, with its reason. The tests allow no other, and none unseen."""

from __future__ import annotations

#: Of decisions, by the name that a state's predicate has in `test_policies`.
DECISIONS = {
    "no report": (
        "Theirs never chooses a replica without metrics, and chooses at random where none has any. Here it counts as "
        "the worst known, so that an engine without metrics gets traffic; the round trip alone decides for gorgo."
    ),
    "no probe": (
        "Before the first probe theirs takes the duration of the scrape for the round trip. Here it is unknown and "
        "counts as the worst known: a scrape takes longer the more an engine has to do."
    ),
    "tie": (
        "Of equal costs of gorgo theirs takes the first in its list. Here the fewest requests in flight win, then "
        "chance, so that a burst does not go to one replica."
    ),
    "no tokens": (
        "Theirs is least-load for a prompt without tokens under prefix-cache. Here it is a prompt without a match."
    ),
    "load of power-of-two": (
        "Theirs compares KV tokens of the last scrape plus prompt tokens in flight. Here it is requests in flight, "
        "which need no metrics; it is no baseline of the paper."
    ),
}

#: Of the prefix index.
INDEX = {
    "blocks": "Theirs matches single tokens. Here a match ends at a block, about 64 tokens live and 512 in a trace.",
}

#: Of affinity.
AFFINITY = {
    "rendezvous": (
        "Theirs takes the hash of the first 256 tokens modulo the number of replicas, which moves most sessions when "
        "one leaves. Here rendezvous hashing moves those of that replica only."
    ),
}

#: Of the tuner in mode `paper`; `--algorithm es-released` has neither of the first three.
TUNER = {
    "worse by 0.5 %": (
        "Theirs compares negative scores with the best times 1.005, which accepts equal and up to 0.5 % worse "
        "candidates. Here only better ones are accepted."
    ),
    "step size": (
        "Theirs begins with a sigma of 0.5, multiplies or divides it by 0.817 by the success rate of the last eight, "
        "and ends after 16 candidates. Here the first sigma is a quarter of the box, each candidate counts, and the "
        "search ends at a smallest step."
    ),
    "clipped": (
        "Theirs may propose its incumbent again, where a step is clipped onto it. Here another step is drawn, at most "
        "20 times."
    ),
    "rank": "Theirs takes the sample of the nearest rank for a p95. Here it lies between the two nearest ranks.",
    "warm-up": (
        "Theirs scores the first 128 samples, whatever weights routed them. Here the first window has samples of the "
        "start weights alone and ends after 60 s, so that queues of earlier weights have passed."
    ),
    "poll": "Theirs scores with the 32nd sample. Here it is the poll that brings it, and those beyond count too.",
    "failures": "Theirs has samples of answered requests alone. Here failed ones fill the window too.",
}
