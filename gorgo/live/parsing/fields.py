"""What routing needs of a request's body: some of its top-level fields, and a sketch of its prompt.

Owns the one parse of a body, wherever it takes place: here, or in the process of `worker`.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from typing import Any

from gorgo.core.json_cost import TINY_BYTES, is_quick
from gorgo.core.json_text import try_parse_json
from gorgo.core.prompt.exact import ExactPrompt
from gorgo.core.prompt.fingerprint import Fingerprinter, PromptSketch
from gorgo.core.prompt.parse import Prompt, read_prompt, read_texts
from gorgo.core.record import mutable_record
from gorgo.errors import BadRequest
from gorgo.live.http.errors import HttpError
from gorgo.live.parsing.json_body import Spans, check_counts, model_spans, parse_body

#: Fields by which engines and gateways pick a worker, a host or a priority, or name a request of another client.
ENGINE_FIELDS = frozenset(
    {
        *("bootstrap_host", "bootstrap_port", "bootstrap_room", "data_parallel_rank", "data_parallel_rank_decode"),
        *("disagg_prefill_dp_rank", "ec_transfer_params", "extra_args", "kv_transfer_params", "nvext", "priority"),
        *("request_id", "rid", "routed_dp_rank", "session_params", "vllm_xargs"),
    }
)
#: Fields that are read after the parse.
READ_FIELDS = ENGINE_FIELDS | {
    *("model", "lora_path", "stream", "store", "previous_response_id", "stream_options", "sampling_params"),
    *("max_completion_tokens", "max_tokens", "max_output_tokens", "max_new_tokens"),
    "cache_salt",
}
#: Characters of a field's text in a body that another process reads: names and ids are shorter.
MAX_TEXT = 4096
#: Members of a field's object in such a body; the rest is left out.
MAX_MEMBERS = 64
#: A body up to here is parsed before its values are counted: of nested lists, the worst, msgspec makes values within
#: 20 ms. What takes longer is to read them, and of texts there is little to read.
UNCOUNTED_BYTES = 192 * 1024
#: Bytes of token ids that another process sends with such a body: 262,144 ids.
MAX_ID_BYTES = 1 << 20


@mutable_record
class BodyFields:
    """One body, read.

    Parameters
    ----------
    values:
        By name; all that are in `READ_FIELDS`, perhaps more.
    sketch:
        Of the prompt.
    tokens:
        Exact length of the prompt, where the client sent token ids.
    spans:
        Places of the model's name; `None` if they are not known.
    prompt:
        Its text; of a body that another process has read, only one prompt of token ids.
    exact:
        Its exact tokens, where they are counted after the parse.
    """

    values: Mapping[str, Any]
    sketch: PromptSketch
    tokens: int | None
    spans: Spans | None = None
    prompt: Prompt | None = None
    exact: ExactPrompt | None = None

    @property
    def token_ids(self) -> bytes | None:
        """Return the packed ids of a prompt that the client sent as ids."""
        prompt = self.prompt
        return prompt.text if prompt is not None and prompt.tokens is not None and prompt.is_single else None


def read_quick_fields(route: str, body: bytes, fingerprinter: Fingerprinter) -> BodyFields | None:
    """Read a body here; `None` if another process should. Raises `HttpError` (400)."""
    parsed = None
    if TINY_BYTES < len(body) <= UNCOUNTED_BYTES and type(parsed := try_parse_json(body)) is dict:
        # Counting takes nearly as long as the parse, and decides nothing where all that is read is text.
        prompt = read_texts(route, parsed)
        if prompt is not None:
            return BodyFields(parsed, fingerprinter.sketch(prompt), None, prompt=prompt)
    if not is_quick(body):
        return None
    return _fields_of(route, parsed, fingerprinter) if type(parsed) is dict else read_fields(route, body, fingerprinter)


def read_fields(route: str, body: bytes, fingerprinter: Fingerprinter) -> BodyFields:
    """Read a body that is quick, or whose values have been counted. Raises `HttpError` (400)."""
    return _fields_of(route, parse_body(body), fingerprinter)


def _fields_of(route: str, parsed: Mapping[str, Any], fingerprinter: Fingerprinter) -> BodyFields:
    try:
        prompt = read_prompt(route, parsed)
    except BadRequest as error:
        raise HttpError(400, "invalid_request", str(error)) from None
    return BodyFields(parsed, fingerprinter.sketch(prompt), prompt.tokens, prompt=prompt)


def read_large_body(route: str, body: bytes, fingerprinter: Fingerprinter) -> BodyFields:
    """Read a body of any size, for another process: only what is small is in the result."""
    if b"\0" in body:
        # UTF-16 and UTF-32 are full of them; JSON on the wire is UTF-8 (RFC 8259).
        raise HttpError(400, "invalid_json", "expected a large body in UTF-8")
    check_counts(body)
    fields = read_fields(route, body, fingerprinter)
    values = {name: _small(name, fields.values[name]) for name in READ_FIELDS & fields.values.keys()}
    ids = fields.token_ids
    sent = fields.prompt if ids is not None and len(ids) <= MAX_ID_BYTES else None
    return BodyFields(values, fields.sketch, fields.tokens, model_spans(body), sent)


def _small(name: str, value: object) -> object:
    """Return a value without lists, and without the containers in an object."""
    if isinstance(value, str) and len(value) > MAX_TEXT:
        raise HttpError(400, "invalid_request", f"{name}: expected at most {MAX_TEXT} characters")
    if isinstance(value, dict):
        members = islice(value.items(), MAX_MEMBERS)
        return {key: member for key, member in members if isinstance(member, int | float | None)}
    return [] if isinstance(value, list) else value
