"""The line of a file at a syntax error, with a caret below. What may be a secret is masked, also for logs."""

from __future__ import annotations

import re

#: Characters shown of a line, with the error among them.
WIDTH = 80
_MASK = "*"
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
    # The breaks of YAML and no others, so that numbers are those of the error.
    lines = re.split("\r\n|[\n\r\x85\u2028\u2029]", text)
    if not 0 < line <= len(lines) or not lines[line - 1].strip():
        return ""
    shown = masked("".join(one if one.isprintable() else " " for one in lines[line - 1]))
    first = max(0, column - WIDTH // 2) if len(shown) > WIDTH else 0
    margin = f"{line} | "
    return f"{margin}{shown[first : first + WIDTH].rstrip()}\n{'| ':>{len(margin)}}{' ' * (column - first)}^"


def masked(line: str) -> str:
    """Return `line` with a star for each character that may be of a secret.

    >>> masked("api_key: CANARY, url: http://me:pw@host")
    'api_key: ******, url: http://*****@host'
    """
    for pattern in _SECRETS:
        for found in reversed(list(pattern.finditer(line))):
            start, end = found.span("secret")
            line = line[:start] + _MASK * (end - start) + line[end:]
    return line
