"""The line of a file at a syntax error, with a caret below. What may be a secret is redacted, also for logs."""

from __future__ import annotations

import re

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
    found = _line(text, line)
    if len(found) > MAX_LINE or not found.strip():
        return ""
    shown = redact_secrets("".join(one if one.isprintable() else " " for one in found))
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
        for found in reversed(list(pattern.finditer(line))):
            start, end = found.span("secret")
            line = line[:start] + _STAR * (end - start) + line[end:]
    return line
