"""Chat templates: messages to the text that the engine encodes.

Owns the rendering and its bounds. See `template_environment` for the sandbox, `template_files` for the files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from time import perf_counter
from typing import Any

from gorgo.live.encoded_prompt import TemplateFailedError

#: Characters of a rendered prompt: twice the longest body that is rendered.
MAX_OUTPUT = 8 << 20
#: Longest rendering, s: it holds the event loop. A conversation of 1,000 messages takes some milliseconds.
MAX_RENDER_S = 0.1
#: Pieces of output between two readings of the clock.
_CLOCK_PIECES = 64

Message = Mapping[str, str]


class ChatTemplate:
    """One template of a model.

    Parameters
    ----------
    source:
        Jinja. Raises `TemplateFailedError` for a syntax error, with its line.
    special_tokens:
        Texts of `bos_token`, `eos_token` and the like.
    clock, date:
        Seconds for the bound on time, and the date for templates that print one.
    """

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        *,
        clock: Callable[[], float] = perf_counter,
        date: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        from jinja2.exceptions import TemplateSyntaxError

        from gorgo.live.tokens.template_environment import TemplateEnvironment

        environment = TemplateEnvironment()
        environment.globals["strftime_now"] = lambda form: date().strftime(form)
        try:
            self._template = environment.from_string(source)
        except (TemplateSyntaxError, RecursionError) as error:
            line = getattr(error, "lineno", 1)
            raise TemplateFailedError(f"line {line}: {error}") from None
        self._special_tokens = dict(special_tokens)
        self._clock = clock

    def render(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = True, options: Mapping[str, object] = {}
    ) -> str:
        """Return the prompt of a conversation. Raises `TemplateFailedError`.

        `options` are the request's `chat_template_kwargs`.
        """
        variables: dict[str, Any] = {"tools": None, "documents": None, **self._special_tokens, **options}
        variables |= {"messages": messages, "add_generation_prompt": add_generation_prompt}
        due_s, size = self._clock() + MAX_RENDER_S, 0
        pieces: list[str] = []
        try:
            for piece in self._template.generate(variables):
                pieces.append(piece)
                size += len(piece)
                if size > MAX_OUTPUT:
                    raise TemplateFailedError(f"over {MAX_OUTPUT:,} characters")
                if not len(pieces) % _CLOCK_PIECES and self._clock() > due_s:
                    raise TemplateFailedError(f"over {MAX_RENDER_S} s")
        except TemplateFailedError:
            raise
        except Exception as error:  # noqa: BLE001 - a template is a program of others, and may raise anything
            raise TemplateFailedError(type(error).__name__) from None
        return "".join(pieces)
