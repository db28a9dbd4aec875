"""YAML text to plain data, with the line of each value and every syntax error.

PyYAML scans and composes; aliases, tags and deep nesting are rejected. Scalars follow the core schema of YAML 1.2.
Leaves the meaning of keys to `load`.

- `excerpt` shows the line of an error, without what may be a secret.
- `Variables` expands `${NAME}` in values.
- `read_document` returns the data, lines and errors of a file.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, field, replace
from math import isfinite, nan
from typing import Any

import yaml
from yaml.events import AliasEvent, Event
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

# The line of a file at a syntax error, with a caret below. What may be a secret is redacted, also for logs.


#: Longest line that is searched for secrets and shown: what a text editor shows in a window.
MAX_LINE = 4096
#: Characters shown of a line, with the error among them.
WIDTH = 80
_STAR = "*"
#: The breaks of YAML and no others, so that numbers are those of the error.
_BREAK = re.compile("\r\n|[\n\r\x85\u2028\u2029]")
#: The value of a key that names a secret, a long mixed word, and what precedes the `@` of an address.
_SECRETS = (
    re.compile(
        r"(?:key|token(?!s)|secret|password|auth|bearer)\w*[\"']?\s*[:=\s]\s*[\"']?(?P<secret>[^\s,{}\[\]\"']+)",
        re.IGNORECASE,
    ),
    re.compile(r"(?<![\w-])(?P<secret>(?=[\w-]*\d)(?=[\w-]*[A-Za-z])[\w-]{24,})"),
    re.compile(r"//(?P<secret>[^\s/@]+)@"),
)


def excerpt(text: str, line: int, column: int) -> str:
    """Return line `line` (from 1) and a caret below column `column` (from 0), or nothing beyond the text.

    >>> print(excerpt("a: 1\\nb: [2, }\\n", 2, 7))
    2 | b: [2, }
      |        ^
    """
    source_line = _line(text, line)
    if len(source_line) > MAX_LINE or not source_line.strip():
        return ""
    shown = redact_secrets("".join(one if one.isprintable() else " " for one in source_line))
    first = max(0, column - WIDTH // 2) if len(shown) > WIDTH else 0
    margin = f"{line} | "
    return f"{margin}{shown[first : first + WIDTH].rstrip()}\n{'| ':>{len(margin)}}{' ' * (column - first)}^"


def _line(text: str, number: int) -> str:
    """Return a line without its end; empty beyond the text."""
    start = 0
    if number < 1:
        return ""
    for _ in range(number - 1):
        end = _BREAK.search(text, start)
        if end is None:
            return ""
        start = end.end()
    end = _BREAK.search(text, start)
    return text[start:] if end is None else text[start : end.start()]


def redact_secrets(line: str) -> str:
    """Return `line` with a star for each character that may be of a secret.

    >>> redact_secrets("api_key: CANARY, url: http://me:pw@host")
    'api_key: ******, url: http://*****@host'
    """
    for pattern in _SECRETS:
        for match in reversed(list(pattern.finditer(line))):
            start, end = match.span("secret")
            line = line[:start] + _STAR * (end - start) + line[end:]
    return line


# `${NAME}` in values of regions.yaml: the value of an environment variable.
#
# Theory of operation. A value is expanded before its type is read, so that `${PORT}` without quotes can be a number,
# and never again afterwards. Keys are not expanded. `${NAME:-text}` is `text` where the variable is unset or empty;
# `$$` is a dollar sign; any other dollar sign stands for itself. The expanded value may be secret: no message shows
# it.


#: Characters from which on a value is hidden without quotes too: a secret has as many, and a shorter value may be a
#: word of the message itself. Messages cut what is longer than `CUT_FROM`.
LEAST_SECRET, CUT_FROM = 7, 24
#: A file has few; the bound is on what a small file with a long variable can grow to.
MAX_EXPANDED = 1024 * 1024
EXPECTED = "${NAME}, ${NAME:-default}, or $$ for a dollar sign"

_REFERENCE = re.compile(r"\$(?:\$|\{(?P<name>[A-Za-z_][A-Za-z0-9_]{0,127})(?::-(?P<default>[^}]*))?\}|(?P<open>\{))")


class VariableError(ValueError):
    """A reference that cannot be expanded; `expected` says what can."""

    def __init__(self, found: str, expected: str) -> None:
        super().__init__(found)
        self.found = found
        self.expected = expected


class UnsetVariableError(VariableError):
    """A variable that is not set, without a default."""


class Variables:
    """The environment as one file uses it.

    Parameters
    ----------
    environ:
        The variables.

    Example
    -------
    >>> variables = Variables({"US": "10.0.0.5"})
    >>> variables.expand("http://${US}:${PORT:-30000}"), sorted(variables.used)
    ('http://10.0.0.5:30000', ['PORT', 'US'])
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ
        self._left = MAX_EXPANDED
        #: Names in the file, with a value or a default.
        self.used: set[str] = set()

    def expand(self, text: str) -> str:
        """Return `text` with its references replaced. Raises `VariableError`."""
        expanded = _REFERENCE.sub(self._value, text)
        self._left -= len(expanded)
        if self._left < 0:
            raise VariableError("values of variables that are too long", f"at most {MAX_EXPANDED:,} characters in all")
        return expanded

    def _value(self, match: re.Match[str]) -> str:
        if match["open"]:
            raise VariableError("'${' without the name of a variable and '}'", EXPECTED)
        name = match["name"]
        if name is None:
            return "$"
        self.used.add(name)
        value, default = self._environ.get(name), match["default"]
        if default is not None:
            return value or default
        if value is None:
            raise UnsetVariableError(
                f"the environment variable {name} is not set", f"it to be set, or ${{{name}:-default}}"
            )
        return value


def has_reference(text: str) -> bool:
    """Return whether `text` may change when it is expanded."""
    return "${" in text or "$$" in text


#: Thousands of replicas fit in a tenth of it; PyYAML needs about eight seconds for a full one.
MAX_BYTES = 1024 * 1024
#: regions.yaml itself is four deep.
MAX_DEPTH = 16
#: Keys, values and lists: three thousand replicas with eight keys each have as many.
MAX_NODES = 65_536
#: Digits that still fit a 64-bit integer; longer ones become floats, which no whole-number key accepts.
_MAX_DIGITS = 18

Path = tuple[str | int, ...]

_MAP = "tag:yaml.org,2002:map"
_SEQ = "tag:yaml.org,2002:seq"
_PLAIN = "plain"
_QUOTED = "quoted"
_BOOL = re.compile(r"true|false")
_NULL = re.compile(r"~|null|")
_INT = re.compile(r"[-+]?(?:0|[1-9][0-9]*)", re.ASCII)
_FLOAT = re.compile(r"[-+]?(?:\.[0-9]+|(?:0|[1-9][0-9]*)(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]{1,4})?", re.ASCII)
_NOT_FINITE = re.compile(r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)")


@dataclass(frozen=True, slots=True)
class Problem:
    """One error: path, line (from 1; 0 for an option), value found and expected; for a syntax error the line's text."""

    path: Path
    line: int
    found: str
    expected: str
    excerpt: str = ""

    def __str__(self) -> str:
        line = f" (line {self.line})" if self.line else ""
        words = f"{show_path(self.path)}{line}: {self.found}; expected {self.expected}"
        return "\n    ".join([words, *self.excerpt.splitlines()])


@dataclass(slots=True)
class Document:
    """Plain data (dict, list, str, int, float, bool, None), the line of each path, and all errors so far."""

    data: object = None
    lines: dict[Path, int] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    #: Values from the environment, as the file has them; messages show no other.
    references: dict[Path, str] = field(default_factory=dict)
    #: What stands for each expanded value in a message: the value, and the text of the file.
    expanded: dict[str, str] = field(default_factory=dict)
    #: Names of the environment variables in the file.
    variables: Set[str] = frozenset()
    #: Paths whose variables are not set, where that is no error. Their values are null.
    unknown: set[Path] = field(default_factory=set)

    def line(self, path: Path) -> int:
        """Return the line of `path`, or of its nearest parent in the text."""
        while path and path not in self.lines:
            path = path[:-1]
        return self.lines.get(path, 1)

    def report(self, path: Path, found: str, expected: str) -> None:
        """Add an error at `path`."""
        self.problems.append(Problem(path, self.line(path), found, expected))

    def hide_expanded(self) -> None:
        """Put the file's own text for each value from the environment into all errors so far."""
        self.problems = [
            replace(problem, found=self.hidden(problem.found), expected=self.hidden(problem.expected))
            for problem in self.problems
        ]

    def hidden(self, message: str) -> str:
        """Return a message with the file's own text for each value from the environment."""
        for value in sorted(self.expanded, key=len, reverse=True):
            shown = self.expanded[value]
            for quoted in (json.dumps(value), ascii(value), f"'{value}'", show_value(value)):
                message = message.replace(quoted, f"the value of {show_value(shown)}")
            if len(value) > CUT_FROM:
                message = re.sub(rf"{re.escape(value[:CUT_FROM])}[^\s\"',;]*", shown.replace("\\", "\\\\"), message)
            elif len(value) >= LEAST_SECRET:
                message = message.replace(value, shown)
        return message


def read_document(text: bytes, environ: Mapping[str, str] | None = None, *, allow_unset: bool = False) -> Document:
    """Parse `text`; syntax errors are in `problems`, and `data` has the rest.

    With `environ`, values may name its variables (`Variables`); one that is not set is an error, or with
    `allow_unset` an unknown value.
    """
    document = Document()
    if len(text) > MAX_BYTES:
        document.report((), f"{len(text):,} bytes", f"at most {MAX_BYTES:,}")
        return document
    try:
        node = _compose(text.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        line = text.count(b"\n", 0, error.start) + 1
        document.problems.append(Problem((), line, "bytes that are not UTF-8", "YAML in UTF-8"))
    except yaml.YAMLError as error:
        document.problems.append(_yaml_problem(error, text.decode("utf-8-sig")))
    except (ValueError, OverflowError):
        # PyYAML raises these for an escape sequence beyond Unicode and for an absurd %YAML version.
        document.report((), "text that is not YAML", "YAML")
    else:
        variables = None if environ is None else Variables(environ)
        document.data = None if node is None else _YamlReader(document, variables, allow_unset).read(node, ())
        document.variables = frozenset() if variables is None else frozenset(variables.used)
    return document


def show_path(path: Path) -> str:
    """Return a path as text.

    >>> show_path(("replicas", 1, "url"))
    'replicas[1].url'
    """
    shown = ""
    for part in path:
        shown += f"[{part}]" if isinstance(part, int) else ("." if shown else "") + _printable(part)
    return shown or "the file"


def show_value(value: object) -> str:
    """Return a value for a message: one line, printable ASCII, at most 60 characters; containers by kind."""
    if isinstance(value, Mapping):
        return "a mapping"
    if isinstance(value, list):
        return "a list" if value else "an empty list"
    if isinstance(value, str):
        return _short(ascii(value))
    return _short(json.dumps(value))


def _printable(key: str) -> str:
    return key if key.isascii() and key.isprintable() and 0 < len(key) <= 60 else _short(ascii(key))


def _short(text: str) -> str:
    return text if len(text) <= 60 else text[:57] + "..."


class _Refused(yaml.MarkedYAMLError):
    """Valid YAML that a regions file may not use; `note` is the expectation."""


class _Composer(yaml.SafeLoader):
    """PyYAML's scanner, parser and composer with a bound on depth and without aliases; its constructor is not used."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.depth = 0
        self.nodes = 0

    def resolve(self, kind: type[Node], _value: object, implicit: tuple[bool, bool] | bool | None) -> str:
        """Return the tag of an untagged node; for a scalar it says whether it was quoted."""
        if kind is ScalarNode:
            return _PLAIN if isinstance(implicit, tuple) and implicit[0] else _QUOTED
        return _MAP if kind is MappingNode else _SEQ

    def compose_node(self, parent: Node | None, index: int) -> Node | None:
        event: Event = self.peek_event()  # type: ignore[no-untyped-call] # types-PyYAML leaves the parser untyped
        mark: Any = event.start_mark  # the stubs give the same mark two types
        if isinstance(event, AliasEvent):
            raise _Refused(problem="an alias", problem_mark=mark, note="plain YAML without aliases")
        if self.depth == MAX_DEPTH:
            raise _Refused(problem="deep nesting", problem_mark=mark, note=f"at most {MAX_DEPTH} levels")
        self.nodes += 1
        if self.nodes > MAX_NODES:
            raise _Refused(problem="too many keys and values", problem_mark=mark, note=f"at most {MAX_NODES:,}")
        self.depth += 1
        node: Node | None = super().compose_node(parent, index)
        self.depth -= 1
        return node


def _compose(text: str) -> Node | None:
    loader = _Composer(text)
    try:
        node: Node | None = loader.get_single_node()
        return node
    finally:
        loader.dispose()


def _yaml_problem(error: yaml.YAMLError, text: str) -> Problem:
    mark = getattr(error, "problem_mark", None)
    line = 1 if mark is None else mark.line + 1
    # Not the mark's own snippet: the line may contain a pasted key.
    shown = "" if mark is None else excerpt(text, line, mark.column)
    begun = getattr(error, "context_mark", None)
    if begun is not None and mark is not None and begun.line != mark.line:
        shown = "\n".join(filter(None, (excerpt(text, begun.line + 1, begun.column), shown)))
    if isinstance(error, _Refused):
        return Problem((), line, str(error.problem), str(error.note), shown)
    said = getattr(error, "problem", None) or getattr(error, "reason", None) or "a syntax error"
    # A mapping in braces ends at the brace of a reference without quotes.
    lines = text.splitlines()
    source_line = lines[mark.line] if mark is not None and mark.line < len(lines) else ""
    is_reference = mark is not None and source_line[: mark.column + 1].endswith("${")
    return Problem((), line, f"not YAML: {_short(said)}", "quotes around ${NAME}" if is_reference else "YAML", shown)


class _YamlReader:
    """Visits the node tree once and fills the document."""

    def __init__(self, document: Document, variables: Variables | None, allow_unset: bool) -> None:
        self._document = document
        self._variables = variables
        self._allow_unset = allow_unset

    def read(self, node: Node, path: Path) -> object:
        self._document.lines.setdefault(path, node.start_mark.line + 1)
        if isinstance(node, MappingNode) and node.tag == _MAP:
            return dict(self._pairs(node, path))
        if isinstance(node, SequenceNode) and node.tag == _SEQ:
            return [self.read(item, (*path, number)) for number, item in enumerate(node.value)]
        if isinstance(node, ScalarNode):
            return self._scalar(node, path)
        self._document.report(path, "a YAML tag", "plain YAML without tags")
        return None

    def _pairs(self, node: MappingNode, path: Path) -> Iterator[tuple[str, object]]:
        keys: set[str] = set()
        for key_node, value_node in node.value:
            if not isinstance(key_node, ScalarNode):
                line = key_node.start_mark.line + 1
                self._document.problems.append(Problem(path, line, "a key that is not text", "keys of plain text"))
                continue
            key, line = key_node.value, key_node.start_mark.line + 1
            where = (*path, key)
            if not _encodes(key):
                self._document.problems.append(Problem(where, line, "half a surrogate pair", "Unicode text"))
                continue
            if key in keys:
                first = self._document.line(where)
                found = f"the key a second time (first on line {first})"
                self._document.problems.append(Problem(where, line, found, "each key once"))
                continue
            keys.add(key)
            self._document.lines[where] = line
            yield key, self.read(value_node, where)

    def _scalar(self, node: ScalarNode, path: Path) -> object:
        """Return a scalar by YAML 1.2's core schema; a quoted one is text."""
        if node.tag not in (_PLAIN, _QUOTED):
            self._document.report(path, "a YAML tag", "plain YAML without tags")
            return None
        text = self._expanded(node.value, path)
        if text is None:
            return None
        value = _plain(text) if node.tag == _PLAIN else text
        if isinstance(value, float) and not isfinite(value):
            self._document.report(path, show_value(node.value), "a finite number")
            return None
        if isinstance(value, str) and not _encodes(value):
            self._document.report(path, "half a surrogate pair", "Unicode text")
            return None
        return value

    def _expanded(self, text: str, path: Path) -> str | None:
        """Return a scalar's text with the values of variables; report one that is not set."""
        if self._variables is None or not has_reference(text):
            return text
        self._document.references[path] = text
        try:
            expanded = self._variables.expand(text)
        except VariableError as error:
            if self._allow_unset and isinstance(error, UnsetVariableError):
                self._document.unknown.add(path)
                return None
            self._document.report(path, error.found, error.expected)
            return None
        if expanded and expanded != text:
            self._document.expanded[expanded] = text
        return expanded


def _plain(text: str) -> object:
    if _NULL.fullmatch(text):
        return None
    if _BOOL.fullmatch(text):
        return text == "true"
    if _INT.fullmatch(text) and len(text) <= _MAX_DIGITS:
        return int(text)
    if _NOT_FINITE.fullmatch(text):
        return nan
    return float(text) if _FLOAT.fullmatch(text) else text


def _encodes(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
