"""Data sets that others publish: where they are, under which licence, and how to know that one arrived whole."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from gorgo.errors import TraceError

MOONCAKE_URL = "https://raw.githubusercontent.com/kvcache-ai/Mooncake/main/FAST25-release/traces/"
ART_CHAT_URL = "https://huggingface.co/datasets/alessiotoniolo/ART-Chat-2.5M/resolve/main/jsonl/"
MIB = 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteDataset:
    """A data set that is fetched, not shipped.

    Parameters
    ----------
    name, about, licence:
        For display.
    url, file:
        Source, and the name of the file here.
    bytes_max:
        Longest file; a longer one is not this data set.
    sha256:
        Of the file; None if not published.
    """

    name: str
    about: str
    licence: str
    url: str
    file: str
    bytes_max: int
    sha256: str | None = None


def remote_datasets() -> list[RemoteDataset]:
    """All that can be fetched, by name."""
    return sorted([*_mooncake(), *_art_chat()], key=lambda one: one.name)


def remote_dataset(name: str) -> RemoteDataset:
    """The one of that name; raises `TraceError` listing the names."""
    found = {one.name: one for one in remote_datasets()}
    if name not in found:
        raise TraceError(f"no data set {name!r} can be fetched; there are: {', '.join(found)}")
    return found[name]


def _mooncake() -> Iterator[RemoteDataset]:
    """The traces of Mooncake's FAST'25 release. The conversation trace has 3 MB; the others are of its kind."""
    traces = {
        "conversation": ("conversation", "b8cbb061a85206d729d91cdc2981f43c9e0d99209dce588d3af5f7934408b9df"),
        "toolagent": ("tool & agent", None),
        "synthetic": ("synthetic", None),
    }
    for name, (about, sha256) in traces.items():
        file = f"{name}_trace.jsonl"
        yield RemoteDataset(
            name=f"mooncake-{name}",
            about=f"Mooncake FAST'25, {about}",
            licence="Apache-2.0",
            url=MOONCAKE_URL + file,
            file=file,
            bytes_max=256 * MIB,
            sha256=sha256,
        )


def _art_chat() -> Iterator[RemoteDataset]:
    """ART-Chat-2.5M, a file per day. The week has about 150 GB by its page; this project has not fetched it."""
    for day in range(20260401, 20260408):
        file = f"artchat_week_{day}.jsonl"
        yield RemoteDataset(
            name=f"art-chat-week-{day}",
            about=f"ART-Chat-2.5M, April {day % 100}, 2026; about 20 GB",
            licence="see the data set's page",
            url=ART_CHAT_URL + file,
            file=file,
            bytes_max=128 * 1024 * MIB,
        )
