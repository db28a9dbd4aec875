"""Names of models: aliases of the configuration, and what each replica lists.

Owns which name a client's name stands for, and which name a replica knows (`ServedModels`), and the lists that are
fetched for a client (`ModelLists`). Leaves routing to the Router, which has the lists under the same names.

Theory of operation. A model has one name in the Router: the alias's model, or the adapter's own name. SGLang knows an
adapter as `<base>:<adapter>` and vLLM as `<adapter>`: both are the adapter here. A name that no replica lists is
looked for in fresh lists of all replicas: once if a replica takes any name, which then decides, and each time if the
request would be refused. Lists are not older then than `MISS_INTERVAL_S`. A 404 of a replica that lists the name has
the lists read again too: the model or adapter may have moved.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Container, Iterable, Set

from gorgo.config.model import Config
from gorgo.config.router_settings import model_names
from gorgo.core.lru import Lru
from gorgo.engines.discovery import ServedModel
from gorgo.live.event_loop import Clock
from gorgo.live.http.headers import KEYS, Header

#: Names that were looked for and not found; the oldest is forgotten.
MAX_MISSES = 1024
#: Shortest time between two readings of all lists for unknown names, which clients may make up. An adapter that is
#: loaded is not found for so long if another unknown name was looked for just before.
MISS_INTERVAL_S = 2.0


class ServedModels:
    """Aliases, and the models that replicas list.

    Parameters
    ----------
    config:
        Has aliases, and the models of replicas.

    Example
    -------
    >>> from gorgo.config.load import parse_config
    >>> models = ServedModels(parse_config(b'''
    ... proxy: {region: a}
    ... regions: [{name: a}]
    ... replicas: [{name: r, region: a, url: "http://r"}]
    ... models: [{name: llama, aliases: [gpt-4]}]
    ... '''))
    >>> models.set_list("r", [ServedModel("llama"), ServedModel("sql", parent="llama")], engine="sglang")
    ('llama', 'sql')
    >>> models.canonical("gpt-4"), models.canonical("llama:sql"), models.engine_name("r", "sql")
    ('llama', 'sql', 'llama:sql')
    """

    def __init__(self, config: Config) -> None:
        self._found: dict[str, tuple[tuple[ServedModel, ...], str]] = {}
        self._misses = Lru[str, None](MAX_MISSES)
        self._read_s = float("-inf")
        self._reading: asyncio.Task[None] | None = None
        #: Reads the lists of all replicas now; None before the monitors run.
        self.read_all: Callable[[], Awaitable[None]] | None = None
        self.configure(config)

    def configure(self, config: Config, *, restarted: Set[str] = frozenset()) -> None:
        """Use the aliases and the models of `config`; lists of replicas that have left or restarted are dropped."""
        self._aliases = model_names(config)
        self._configured = {replica.name: replica.models for replica in config.replicas}
        staying = self._configured.keys() - restarted
        self._found = {name: listing for name, listing in self._found.items() if name in staying}
        self._index()

    def set_list(self, replica: str, models: Iterable[ServedModel], *, engine: str) -> tuple[str, ...]:
        """Store the list of a replica; return it in names of the Router."""
        self._found[replica] = tuple(models), engine
        self._index()
        return self.listed(replica)

    def listed(self, replica: str) -> tuple[str, ...]:
        """Return the models that a replica lists, in names of the Router."""
        models, _ = self._found.get(replica, ((), ""))
        return tuple(dict.fromkeys(self._aliases.get(model.name, model.name) for model in models))

    def served(self, replica: str) -> tuple[str, ...]:
        """Return the models that a replica lists, or those of the configuration without a list."""
        return self.listed(replica) or tuple(
            self._aliases.get(name, name) for name in self._configured.get(replica, ())
        )

    def contexts(self, replica: str) -> dict[str, int]:
        """Return the contexts of the models that a replica lists, where it says them: by name in the Router, tokens."""
        models, _ = self._found.get(replica, ((), ""))
        contexts = {self._aliases.get(model.name, model.name): model.context_tokens for model in models}
        return {name: tokens for name, tokens in contexts.items() if tokens is not None}

    def canonical(self, name: str | None) -> str | None:
        """Return the name in the Router of the model that a client calls `name`."""
        return name if name is None else self._synonyms.get(name, name)

    def engine_name(self, replica: str, model: str) -> str:
        """Return the name by which a replica knows a model of the Router."""
        return self._engine_names.get((replica, model), model)

    def is_adapter(self, model: str | None) -> bool:
        """Return whether some replica lists `model` as an adapter: its cached prefixes are its own."""
        return model in self._parents

    def governing(self, model: str | None, rules: Container[str]) -> str | None:
        """Return the model whose rule holds for `model`: its own if it has one, else that of an adapter's base."""
        base = None if model in rules else self._parents.get(model or "")
        return model if base is None else self._aliases.get(base, base)

    def serving(self, base: str, rules: Container[str]) -> list[str]:
        """Return the replicas that serve `base`, a model of `rules`, or an adapter of it, or any model."""
        return [
            replica
            for replica in self._configured
            if not (served := self.served(replica)) or any(self.governing(name, rules) == base for name in served)
        ]

    def names(self, model: str) -> list[str]:
        """Return the names by which clients may call a model of the Router."""
        return list(dict.fromkeys([model, *(alias for alias, name in self._aliases.items() if name == model)]))

    def rows(self) -> list[dict[str, object]]:
        """Return the rows of `/v1/models`: configured models, listed ones, and aliases; empty if none is known."""
        names = [name for replica in self._configured for name in self._configured[replica]]
        names += [name for replica in self._configured for name in self.listed(replica)]
        served = {self.canonical(name) for name in names}
        names += [alias for alias, name in self._aliases.items() if name in served]
        return [self._row(name) for name in dict.fromkeys(names)]

    def _row(self, name: str) -> dict[str, object]:
        entry: dict[str, object] = {"id": name, "object": "model", "created": 0, "owned_by": "gorgo"}
        contexts = [self.contexts(replica).get(self.canonical(name) or name) for replica in self._found]
        if limits := [tokens for tokens in contexts if tokens is not None]:
            entry["max_model_len"] = max(limits)
        return entry | ({"parent": self._parents[name]} if name in self._parents else {})

    def may_find(self, name: str, *, refused: bool, now: float) -> bool:
        """Return whether fresh lists could have `name`; `refused` if no replica would be sent it."""
        if self.read_all is None or not self._found or (name in self._misses and not refused):
            return False
        return self._reading is not None or now - self._read_s >= MISS_INTERVAL_S

    async def find_missing(self, name: str, *, refused: bool, now: float) -> bool:
        """Read all lists for a name that no replica lists, not too often.

        Return whether they were read. Several requests wait for one reading.
        """
        if not self.may_find(name, refused=refused, now=now):
            return False
        await asyncio.shield(self._start_reading(now))
        self._misses.put(name, None)
        return True

    def read_again(self, name: str, replica: str, *, now: float) -> asyncio.Future[None] | None:
        """Read all lists after a 404 of a replica that lists `name`, which may have moved to another.

        Return the reading; `None` if it does not list it, or the lists were read less than `MISS_INTERVAL_S` ago.
        """
        if self.read_all is None or (self._reading is None and now - self._read_s < MISS_INTERVAL_S):
            return None
        return self._start_reading(now) if name in self.listed(replica) else None

    def _start_reading(self, now: float) -> asyncio.Future[None]:
        """Return the reading of all lists that is in progress, or a new one."""
        assert self.read_all is not None, "the monitors run"
        if self._reading is None:
            self._read_s = now
            self._reading = asyncio.ensure_future(self.read_all())
            self._reading.add_done_callback(self._read)
        return self._reading

    def _read(self, task: asyncio.Future[None]) -> None:  # noqa: ARG002 - the signature of a callback
        self._reading = None

    def _index(self) -> None:
        self._parents: dict[str, str] = {}
        self._synonyms: dict[str, str] = {}
        self._engine_names: dict[tuple[str, str], str] = {}
        for replica, names in self._configured.items():
            for name in names:
                self._engine_names.setdefault((replica, self._aliases.get(name, name)), name)
        for replica, (models, engine) in self._found.items():
            self._index_replica(replica, models, engine)
        listed = {model.name for models, _ in self._found.values() for model in models}
        self._synonyms = {name: model for name, model in self._synonyms.items() if name not in listed} | self._aliases

    def _index_replica(self, replica: str, models: Iterable[ServedModel], engine: str) -> None:
        spellings: dict[str, str] = {}
        for model in models:
            name = self._aliases.get(model.name, model.name)
            spelled = model.name
            if model.parent is not None:
                self._parents.setdefault(name, model.parent)
                self._synonyms[f"{model.parent}:{model.name}"] = name
                spelled = f"{model.parent}:{model.name}" if engine == "sglang" else spelled
            if name not in spellings or model.name == name:
                spellings[name] = spelled
        self._engine_names |= {(replica, name): spelled for name, spelled in spellings.items()}


# Lists of models that replicas answer, where the configuration and the monitors know none.
#
# Theory of operation. Clients with the same key share one answer for a few seconds, and one fetch: a client's key
# passes to the replica, which may list other models for another key.


#: Models come and go with replicas, and a client that polls does it once a minute.
FRESH_S = 5.0
#: Keys with an answer each; 64 answers of an engine are some 100 kB.
MAX_LISTS = 64

_Credentials = tuple[Header, ...]


class ModelLists:
    """Answers by the credentials of clients.

    Parameters
    ----------
    clock:
        Monotonic seconds.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lists = Lru[_Credentials, tuple[float, asyncio.Task[bytes]]](MAX_LISTS)

    def clear(self) -> None:
        """Forget all answers, after a change of the fleet."""
        self._lists.clear()

    async def get(self, headers: Iterable[Header], fetch: Callable[[], Awaitable[bytes]]) -> bytes:
        """Return the answer for the credentials in `headers`, fetched if there is no fresh one. Raises as `fetch`."""
        key = tuple(pair for pair in headers if pair[0] in KEYS)
        expiry_s, task = self._lists.get(key, (float("-inf"), None))
        failed = task is not None and task.done() and (task.cancelled() or task.exception() is not None)
        if task is None or failed or (task.done() and self._clock() >= expiry_s):
            task = asyncio.ensure_future(fetch())
            self._lists.put(key, (self._clock() + FRESH_S, task))
        return await asyncio.shield(task)  # a client that leaves ends no other's fetch
