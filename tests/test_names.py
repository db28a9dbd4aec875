"""Names of the code: the field's words, one name per class, and no method name with ten meanings.

Reads the syntax trees of `gorgo`, `tuner` and `experiments`. A word is refused wherever it is a part of a name: of a
module, class, function, parameter, attribute or variable, and of a key, option, metric or log event, which are string
constants of the sources.
"""

from __future__ import annotations

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.sources import parsed

ROOT = Path(__file__).parents[1]

#: Private word -> the field's words for it. Refused as a part of every name.
WORDS: Mapping[str, str] = {
    "ask": "request, parse, propose",
    "asked": "requested, parsed",
    "asks": "requests",
    "beat": "cancelled",
    "belief": "estimate",
    "beliefs": "estimates",
    "believed": "estimated",
    "crowded": "quota_exceeded",
    "desk": "gateway",
    "door": "admission, saturation",
    "doors": "admission, saturation",
    "dog": "timeout",
    "ending": "result",
    "endings": "results",
    "figures": "stats",
    "flights": "round_trips",
    "foresee": "predict",
    "foreseen": "predicted",
    "freezing": "stall",
    "gone": "disconnected, done",
    "held": "queued",
    "hopeless": "infeasible",
    "hurry": "shorten_backoff",
    "kept": "retained, stored, persisted",
    "levers": "fault_api",
    "lives": "lifecycle",
    "look": "probe, poll, evaluate",
    "looked": "evaluated",
    "looking": "probing, polling",
    "looks": "probes, polls, evaluations",
    "newcomer": "arrival",
    "nobody": "none",
    "onlooker": "observer",
    "outlook": "estimate",
    "over": "done",
    "room": "queue, capacity",
    "rooms": "queues",
    "seen": "observed",
    "squeezed": "burst",
    "standing": "health",
    "standings": "health_states",
    "steering": "control",
    "stirred": "needs_drain",
    "tell": "report, publish, notify",
    "teller": "observer",
    "tells": "reports",
    "told": "reported, notified",
    "walk": "drain, match",
    "walks": "drains, matches",
    "watcher": "monitor",
    "watchers": "monitors",
    "way": "network, route",
    "whose": "owner_of",
    "widen": "allow_out_of_range",
    "wish": "option",
    "wishes": "options",
    "yardstick": "baseline",
    "yardsticks": "baselines",
}

#: Words that say nothing of what a local name holds, with the bindings in `gorgo` and `tuner` that have them still:
#: fields, arguments that are passed by name, and small modules. A `row` of candidates or of a table is one.
VAGUE_NAMES: Mapping[str, int] = {"found": 60, "known": 5, "own": 15, "place": 25, "row": 240}

#: Names and keys that were replaced, each with what it became. Refused as whole names.
REPLACED: Mapping[str, str] = {
    "BatchBound": "ConcurrencyLimit",
    "BusyClock": "PrefillQueue",
    "ClientBook": "ClientQuotas",
    "ComingBack": "RetryAfter",
    "Excess": "QuotaExceeded",
    "FrontDoor": "AdmissionController",
    "Holding": "Residency",
    "Ledger": "InFlightTable",
    "Member": "Replica",
    "Orders": "ChangeQueue, CommandQueue",
    "Placement": "Evaluation",
    "Placer": "Dispatcher",
    "Sink": "ResponseWriter",
    "WaitingRoom": "FairQueue",
    "between_chunks_timeout_s": "stream_idle_timeout_s",
    "body_gap_timeout_s": "body_idle_timeout_s",
    "first_content_timeout_s": "first_token_timeout_s",
    "hedge_late_ms": "hedge_delay_ms",
    "hedge_share": "hedge_budget_ratio",
    "open_in_flight": "max_concurrency_per_replica",
    "open_work_ms": "max_backlog_ms",
    "region_cut_off": "region_unreachable",
    "retry_share": "retry_budget_ratio",
    "thaw": "unfreeze",
    "total_timeout_s": "request_timeout_s",
    "whole_answer_timeout_s": "response_timeout_s",
}

#: Names of the field that have such a word, and where each may stand.
FIELD_NAMES: Mapping[str, str] = {
    # The interface of optimizers in Python: cmaes, pycma, Optuna, scikit-optimize.
    "ask": "tuner/optimizers/",
    "asked": "tuner/optimizers/",
    "tell": "tuner/optimizers/",
    "told": "tuner/optimizers/",
    "tell_incumbent": "tuner/optimizers/",
    "told_point": "tuner/optimizers/",
    # Data that a search has not used ("held-out set").
    "held_out": "",
    "held_out_from_s": "tuner/",
    "held_out_seed": "tuner/",
    "held_out_seeds": "",
    # A field of SGLang's requests.
    "bootstrap_room": "gorgo/live/parsing/",
    # Networking: one-way delay.
    "one_way_s": "",
    # Fallbacks of learned routers: the words of the specification.
    "affinity_kept": "gorgo/policies/learned/",
    # The term of a cost for room in a cache: what a prompt pushes out of it.
    "room": "",
    # Reading a bounded number of items before they are due.
    "look_ahead": "",
}

#: Old keys as data: the table that an error for an old file is made of.
TABLE_OF_OLD_KEYS = "gorgo/config/load.py"

#: Method names that stand for one thing in every class that has them, so that any number may.
USUAL_METHODS = {
    # Lifecycle.
    *("start", "stop", "run", "close", "aclose", "reset"),
    # A request into what serves it, as in `concurrent.futures`.
    "submit",
    # Containers and streams.
    *("add", "remove", "get", "read", "write", "flush", "feed", "release"),
    # Own invariants; a record as JSON, or made of other records; persisted state.
    *("check", "as_dict", "as_json", "of", "state", "load"),
    # The contracts of policies, of models and of an experiment's runs.
    *("choose", "ttft_s", "key"),
}
#: Families of classes (a base and what derives from it) that may have a public method of one other name.
MOST_FAMILIES = 5
#: Method names that say nothing of their object. Events of a collaborator are `on_<event>`.
VAGUE_METHODS = {
    *("arrive", "beat", "began", "ended", "enter", "eased", "go", "go_on", "had", "left", "look", "meet", "nobody"),
    *("note", "over", "seen", "sent", "settle", "shown", "take", "taken", "tell", "told", "took", "wake", "walk"),
}

CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
KEY = re.compile(r"(?:--)?[a-z][a-z0-9]*(?:[_-][a-z0-9]+)*")


class Name(NamedTuple):
    """A name and the path of its module."""

    text: str
    path: str


@cache
def sources() -> dict[str, ast.Module]:
    """Syntax tree of each module, by path."""
    paths = sorted(path for top in ("gorgo", "tuner", "experiments") for path in (ROOT / top).rglob("*.py"))
    assert len(paths) > 200
    return {path.relative_to(ROOT).as_posix(): parsed(path.read_text()) for path in paths}


def defined(node: ast.AST) -> Iterator[str]:
    """Names of classes, functions, parameters, attributes, constants and variables."""
    match node:
        case ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef():
            yield node.name
        case ast.arg():
            yield node.arg
        case ast.Attribute(ctx=ast.Store()):
            yield node.attr
        case ast.Name(ctx=ast.Store()):
            yield node.id


def bound(node: ast.AST) -> Iterator[str]:
    """Parameters, and targets of assignments, loops, comprehensions, `with` and `:=`."""
    match node:
        case ast.arg():
            yield node.arg
        case ast.Name(ctx=ast.Store()):
            yield node.id


def keys(node: ast.AST) -> Iterator[str]:
    """String constants that are names: compound ones and options anywhere, single words as keys of mappings."""
    match node:
        case ast.Constant(value=str(text)) if "_" in text or "-" in text:
            yield text
        case ast.Dict():
            yield from (key.value for key in node.keys if isinstance(key, ast.Constant) and isinstance(key.value, str))
        case ast.Subscript(slice=ast.Constant(value=str(text))):
            yield text
        case ast.Call(func=ast.Attribute(attr="get" | "pop" | "setdefault"), args=[ast.Constant(value=str(text)), *_]):
            yield text


@cache
def names() -> set[Name]:
    """Every name of the code, with the module that has it."""
    found = set()
    for path, tree in sources().items():
        module = Path(path)
        found.add(Name(module.parent.name if module.stem == "__init__" else module.stem, path))
        for node in ast.walk(tree):
            found.update(Name(text, path) for text in defined(node))
            if path != TABLE_OF_OLD_KEYS:
                found.update(Name(text, path) for text in keys(node) if KEY.fullmatch(text))
    return found


@cache
def words(name: str) -> tuple[str, ...]:
    """Words of a name in any of the usual spellings.

    >>> words("KeptRun_asAsked--by-me")
    ('kept', 'run', 'as', 'asked', 'by', 'me')
    """
    return tuple(re.findall(r"[a-z0-9]+", CAMEL.sub("_", name).lower()))


def field_name(name: Name) -> str | None:
    """Entry of FIELD_NAMES that a name is, None without one."""
    key = "_".join(words(name.text))
    return key if key in FIELD_NAMES and name.path.startswith(FIELD_NAMES[key]) else None


def field_words(name: Name) -> list[str]:
    """What the private words of a name are to be; empty if it has none."""
    if field_name(name):
        return []
    key = name.text.strip("_-").replace("-", "_")
    return [WORDS[word] for word in words(name.text) if word in WORDS] + ([REPLACED[key]] if key in REPLACED else [])


@cache
def classes() -> list[tuple[str, ast.ClassDef]]:
    """Each class with the path of its module."""
    return [
        (path, node) for path, tree in sources().items() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)
    ]


def generic(base: ast.expr) -> ast.expr:
    """Return a base without its type arguments."""
    return base.value if isinstance(base, ast.Subscript) else base


def families() -> dict[str, str]:
    """Class -> the first base in `gorgo` or `tuner` that it derives from, or itself."""
    bases = {
        node.name: [base.id for base in map(generic, node.bases) if isinstance(base, ast.Name)] for _, node in classes()
    }

    def root(name: str) -> str:
        known = [base for base in bases[name] if base in bases]
        return root(known[0]) if known else name

    return {name: root(name) for name in bases}


def methods() -> Iterator[tuple[str, ast.ClassDef, str]]:
    """Public methods: path, class, name."""
    for path, node in classes():
        for inner in node.body:
            if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef) and not inner.name.startswith("_"):
                yield path, node, inner.name


def names_with_private_words() -> set[str]:
    return {f"{name.path} {name.text}: {', '.join(better)}" for name in names() if (better := field_words(name))}


def classes_of_one_name() -> set[str]:
    count = Counter(node.name for _, node in classes())
    return {f"{path} class {node.name}" for path, node in classes() if count[node.name] > 1}


def methods_of_many_meanings() -> set[str]:
    family = families()
    found = defaultdict(set)
    for _, node, name in methods():
        if name not in USUAL_METHODS and not name.startswith(("on_", "set_")):
            found[name].add(family[node.name])
    return {f"{path} {node.name}.{name}" for path, node, name in methods() if len(found[name]) > MOST_FAMILIES}


def methods_without_an_object() -> set[str]:
    vague = ((path, node, name) for path, node, name in methods() if name in VAGUE_METHODS)
    return {f"{path} {node.name}.{name}" for path, node, name in vague if not path.startswith("tuner/optimizers/")}


RULES = (names_with_private_words, classes_of_one_name, methods_of_many_meanings, methods_without_an_object)


@pytest.mark.parametrize("rule", RULES)
def test_names_are_those_of_the_field(rule: Callable[[], set[str]]) -> None:
    assert sorted(rule()) == []


def test_local_names_say_what_they_hold() -> None:
    trees = [tree for path, tree in sources().items() if path.startswith(("gorgo/", "tuner/"))]
    count = Counter(name for tree in trees for node in ast.walk(tree) for name in bound(node) if name in VAGUE_NAMES)
    more = {word: f"{count[word]}, at most {most}" for word, most in VAGUE_NAMES.items() if count[word] > most}
    assert not more, f"name what it holds by the noun of docs/glossary.md (replica, slot, match): bindings {more}"


def test_every_kind_of_binding_is_counted() -> None:
    source = """
def of(found, *, own=None):
    for row, (place, *known) in [each for each in found if (last := each)]:
        with row as taken:
            own[place], total.sum = taken, last
"""
    names_bound = {name for node in ast.walk(ast.parse(source)) for name in bound(node)}
    assert names_bound == {"found", "own", "row", "place", "known", "each", "last", "taken"}


def test_every_kind_of_name_is_read() -> None:
    source = """
class Held(Base):
    kept: int = 0

    def told(self, asked: str, *, door: str = "", **gone: object) -> None:
        self.seen, [look] = asked, gone.get("standing"), {"wishes": "a_key_anywhere", door: "--the-option"}["kept"]
"""
    nodes = list(ast.walk(ast.parse(source)))
    named = {text for node in nodes for text in defined(node)} - {"self"}
    assert named == {"Held", "kept", "told", "asked", "door", "gone", "seen", "look"}
    found = {text for node in nodes for text in keys(node)}
    assert found == {"standing", "wishes", "a_key_anywhere", "--the-option", "kept"}
    assert {text for text in named | found if field_words(Name(text, "gorgo/module.py"))} == named | found - {
        "a_key_anywhere",
        "--the-option",
    }


def test_a_name_of_the_field_is_one_only_in_its_place() -> None:
    assert field_words(Name("asked", "tuner/optimizers/base.py")) == []
    assert field_words(Name("asked", "gorgo/core/router.py")) == [WORDS["asked"]]
    assert field_words(Name("retry_share", "gorgo/config/model.py")) == [REPLACED["retry_share"]]


def test_every_exception_is_needed() -> None:
    """An entry that no module has would let its name come back."""
    assert {field_name(name) for name in names()} - {None} == FIELD_NAMES.keys()
    assert {name for _, _, name in methods()} >= USUAL_METHODS
