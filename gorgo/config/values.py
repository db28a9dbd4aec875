"""Types of the values in regions.yaml: each with its range or its check."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, ConfigDict, Field, ValidatorFunctionWrapHandler, with_config

from gorgo.config.addresses import checked_bind, checked_kv_endpoint, checked_origin, checked_store_url, checked_url
from gorgo.config.engine_names import checked_engine
from gorgo.config.header_names import checked_header

_Entry = TypeVar("_Entry")


def _printable(text: str) -> str:
    """Reject control characters and marks of direction: names are in logs, tables and pages."""
    if not text.isprintable():
        raise ValueError("printable characters")
    return text


def some(entries: tuple[_Entry, ...]) -> tuple[_Entry, ...]:
    """Reject an empty list. `min_length` would also fail where every entry is invalid by itself."""
    if not entries:
        raise ValueError("at least one entry")
    return entries


def auto_or(found: object) -> Callable[[Any, ValidatorFunctionWrapHandler], Any]:
    """Accept `auto` for the mapping `found`."""

    def check(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        if value == "auto":
            return handler(found)
        if not isinstance(value, Mapping):
            raise ValueError("auto, or a mapping")
        return handler(value)

    return check


Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]
Port = Annotated[int, Field(ge=1, le=65_535)]
#: Of a training; a sample takes 200 bytes in two processes.
Samples = Annotated[int, Field(ge=1, le=200_000)]
Text = Annotated[str, Field(min_length=1, max_length=256), AfterValidator(_printable)]
EnvironmentName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,127}$")]
Url = Annotated[str, AfterValidator(checked_url)]
StoreUrl = Annotated[str, AfterValidator(checked_store_url)]
FilePath = Annotated[str, Field(min_length=1, max_length=4096)]
KvEndpoint = Annotated[str, AfterValidator(checked_kv_endpoint)]
Origin = Annotated[str, AfterValidator(checked_origin)]
Bind = Annotated[str, AfterValidator(checked_bind)]
EngineName = Annotated[str, AfterValidator(checked_engine)]
HeaderName = Annotated[str, AfterValidator(checked_header)]

#: An unknown key is an error: a misspelt limit would silently keep its default.
strict = with_config(ConfigDict(extra="forbid"))
