"""The Jinja environment of chat templates: sandboxed, with what templates of published models use.

Imported only with the extra `tokens`.

Theory of operation. Templates come with files of models, so they are not trusted: the sandbox refuses attributes of
Python objects and changes of its arguments, as `transformers` has it. Beyond that, products that would fill memory are
refused, and `ChatTemplate` bounds the output and its time.
"""

from __future__ import annotations

import json
from typing import Any, NoReturn

from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

#: Length of a text or list that a template may make by repetition, and the largest exponent.
MAX_REPEATED = 1 << 20
MAX_EXPONENT = 64


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """The environment of one template."""

    intercepted_binops = frozenset({"*", "**"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationTag])
        self.filters["tojson"] = _to_json
        self.globals["raise_exception"] = _raise

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Return a product or a power; one that would fill memory is refused."""
        if operator == "**" and not (isinstance(right, int | float) and abs(right) <= MAX_EXPONENT):
            raise SecurityError(f"an exponent above {MAX_EXPONENT}")
        for repeated, count in ((left, right), (right, left)):
            sized = isinstance(repeated, str | bytes | list | tuple)
            if operator == "*" and sized and isinstance(count, int) and len(repeated) * count > MAX_REPEATED:
                raise SecurityError(f"a repetition of over {MAX_REPEATED} elements")
        return super().call_binop(context, operator, left, right)


class _GenerationTag(Extension):
    """Accepts `{% generation %}`, which marks answers for training and renders nothing of its own."""

    tags = {"generation"}  # noqa: RUF012 - as the base class has it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON as `transformers` renders it: the filter of Jinja itself escapes HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)
