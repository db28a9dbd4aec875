"""The files of a chat template: that of the configuration, else those beside `tokenizer.json`, as engines read them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gorgo.errors import InvalidValueError
from gorgo.live.encoded_prompt import TemplateFailedError
from gorgo.live.tokens.chat_template import ChatTemplate
from gorgo.live.tokens.tokenizer import read_file

#: Ten times the longest template of a published model, with a vocabulary's worth of special tokens beside it.
MAX_FILE_BYTES = 4 << 20
_PLACE = "models[].chat_template"
_EXPECTED = "a Jinja file, or a JSON file with the key chat_template"
#: File of the template, and file with the special tokens and perhaps the template.
_TEMPLATE_FILE, _CONFIG_FILE = "chat_template.jinja", "tokenizer_config.json"


def read_template(tokenizer: Path, given: Path | None) -> ChatTemplate | None:
    """Return the template of a model; `None` if no file has one. Raises `InvalidValueError`.

    `given` is the file of the configuration. Without one the files beside `tokenizer` count: `chat_template.jinja`
    first, then `tokenizer_config.json`.
    """
    config_file, beside = tokenizer.with_name(_CONFIG_FILE), tokenizer.with_name(_TEMPLATE_FILE)
    config = _object(config_file) if config_file.exists() else {}
    path = given or (beside if beside.exists() else config_file)
    if path.suffix != ".json":
        source: str | None = _text(path)
    else:
        source = _source(config if path == config_file and given is None else _object(path), path, given is not None)
    if source is None:
        return None
    try:
        return ChatTemplate(source, _special_tokens(config))
    except TemplateFailedError as error:
        raise InvalidValueError(_PLACE, f"{str(path)!r}: {error}", "a Jinja template") from None


def template_paths(tokenizer: Path, given: Path | None) -> list[Path]:
    """Return the files that `read_template` may read."""
    return [tokenizer.with_name(_CONFIG_FILE), given or tokenizer.with_name(_TEMPLATE_FILE)]


def _source(config: Mapping[str, Any], path: Path, required: bool) -> str | None:
    """Return the template of a JSON file; of several, the one named `default`."""
    found = config.get("chat_template")
    if isinstance(found, list):
        named = {entry.get("name"): entry.get("template") for entry in found if isinstance(entry, dict)}
        found = named.get("default")
    if isinstance(found, str) and found:
        return found
    if found is not None or required:
        raise InvalidValueError(_PLACE, f"{str(path)!r} has no template", _EXPECTED)
    return None


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the texts of `bos_token` and the like; each is a text or an object with its `content`."""
    found = {}
    for name, value in config.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            found[name] = text
    return found


def _object(path: Path) -> Mapping[str, Any]:
    try:
        found = json.loads(_text(path))
    except (ValueError, RecursionError) as error:
        raise InvalidValueError(_PLACE, f"{str(path)!r}: {str(error)[:200]}", _EXPECTED) from None
    if not isinstance(found, dict):
        raise InvalidValueError(_PLACE, f"{str(path)!r} is no JSON object", _EXPECTED)
    return found


def _text(path: Path) -> str:
    data = read_file(path, limit=MAX_FILE_BYTES, place=_PLACE, expected=_EXPECTED)
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise InvalidValueError(_PLACE, f"{str(path)!r}: byte {error.start} is not UTF-8", _EXPECTED) from None
