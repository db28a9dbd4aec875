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
