"""What a running proxy holds at one moment, as it is written by `served.py` and read by the soak."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Self


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledgers:
    """Counts of what is open or kept; all of a request's are zero when it has ended.

    Parameters
    ----------
    number:
        Of this look, from 1.
    in_flight, held, exchanges, addressees, sources:
        Attempts in the Router's ledger, requests that wait, tasks of exchanges, requests that the desk knows, answers
        of replicas that are being read.
    replica_requests, replica_tokens, queued_prefill_tokens, clocked:
        Over all replicas: attempts, their prompt tokens, those before a first token, and what busy clocks wait for.
    clients:
        Open requests per client.
    retries_spent, hedges_spent:
        What budgets have given out and not yet forgotten.
    hedge_watch, drop_watch:
        Attempts that a hedger may look at later, and times at which somebody who waits may be dropped.
    tasks, fds, resident:
        Of the process: asyncio tasks, open files, bytes of memory.
    index_blocks, samples:
        What is kept up to a bound.
    faults:
        What `Router.check` has to say; empty is well.
    """

    number: int
    in_flight: int
    held: int
    exchanges: int
    addressees: int
    sources: int
    replica_requests: int
    replica_tokens: int
    queued_prefill_tokens: int
    clocked: int
    clients: Mapping[str, int]
    retries_spent: int
    hedges_spent: int
    hedge_watch: int
    drop_watch: int
    tasks: int
    fds: int
    resident: int
    index_blocks: int
    samples: int
    faults: str = ""

    def open_ledgers(self) -> dict[str, int]:
        """Those that belong to requests and are not zero."""
        counts = {name: getattr(self, name) for name in OF_REQUESTS}
        counts |= {f"client {name}": count for name, count in self.clients.items()}
        return {name: count for name, count in counts.items() if count}

    def as_text(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def read(cls, path: Path) -> Self | None:
        """The newest look; None before the first."""
        try:
            found: dict[str, Any] = json.loads(path.read_text())
        except FileNotFoundError:
            return None
        return cls(**{field.name: found[field.name] for field in fields(cls)})


def summed(found: Sequence[Ledgers]) -> Ledgers:
    """Return what several processes hold together."""
    clients: Counter[str] = Counter()
    for each in found:
        clients.update(each.clients)
    counts = {field.name: sum(getattr(each, field.name) for each in found) for field in fields(Ledgers)[:-1]
              if field.name != "clients"}  # fmt: skip
    return Ledgers(**counts, clients=dict(clients), faults="; ".join(each.faults for each in found if each.faults))


#: Zero while no request is open. A hedger forgets ended attempts when it next looks, so its watch is not among them.
OF_REQUESTS = (
    "in_flight",
    "held",
    "exchanges",
    "addressees",
    "sources",
    "replica_requests",
    "replica_tokens",
    "queued_prefill_tokens",
    "clocked",
)
