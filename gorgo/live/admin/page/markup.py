"""HTML that is escaped by construction.

A `str` is text and is always escaped; only `Html` is inserted as it is, and only this module makes it from other
values than constants.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache
from html import escape


class Html(str):
    """Markup."""

    __slots__ = ()


#: What can stand inside an element; `None` is nothing.
Child = str | int | None

_NOTHING = Html("")
#: Controls, marks that change the direction of the text around them, and halves of surrogate pairs.
_UNSHOWN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ufeff\ud800-\udfff]")


def tag(name: str, /, *children: Child, **attributes: Child | bool) -> Html:
    """An element. Attributes may end in `_`, which is left out, and have `_` for `-`; `None` and False leave one out.

    >>> tag("p", "1 < 2 ", tag("b", "so"), class_="a", data_id='"')
    '<p class="a" data-id="&quot;">1 &lt; 2 <b>so</b></p>'
    """
    inner = "".join(map(_text, children))
    if not attributes:
        return Html(f"<{name}>{inner}</{name}>")
    return Html(f"<{name}{''.join(_attribute(*pair) for pair in attributes.items())}>{inner}</{name}>")


def void(name: str, /, **attributes: Child | bool) -> Html:
    """An element that has no end tag.

    >>> void("input", type="password", required=True)
    '<input type="password" required>'
    """
    return Html(f"<{name}{''.join(_attribute(*pair) for pair in attributes.items())}>")


def joined(parts: Iterable[Child]) -> Html:
    """One after another."""
    return Html("".join(map(_text, parts)))


def _text(child: Child) -> str:
    if child is None:
        return _NOTHING
    if isinstance(child, Html):
        return child
    text = str(child)
    # Most of what is shown are numbers.
    return text if text.isalnum() else _escaped(text)


def _escaped(text: str) -> str:
    return escape(text if text.isprintable() else _UNSHOWN.sub("\N{REPLACEMENT CHARACTER}", text))


@lru_cache(maxsize=2048, typed=True)
def _attribute(name: str, value: Child | bool) -> str:
    if value is None or value is False:
        return ""
    name = name.rstrip("_").replace("_", "-")
    return f" {name}" if value is True else f' {name}="{_escaped(str(value))}"'
