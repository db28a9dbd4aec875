"""Start of a process with a Router: what `gorgo serve` and `gorgo picker` share.

Owns the way from the text of regions.yaml and the options to a running front end, and the settings of the garbage
collector that such a process has. Leaves the process itself to `gorgo.live.process`.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol

import typer

from gorgo.errors import InvalidValueError

if TYPE_CHECKING:
    from gorgo.cli.validation import Overrides, ValidConfig
    from gorgo.config.model import Config
    from gorgo.live.listener.sockets import ServerAddresses
    from gorgo.live.process import ProcessOptions


StateFile = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        show_default=False,
        help="File that keeps freeze, weights, policy, drain marks and registered replicas.",
    ),
]
RequestLog = Annotated[
    Path | None,
    typer.Option(metavar="FILE", show_default=False, help="Append a line per finished request, without its text."),
]
OutcomeLog = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", show_default=False, help="Append a line per attempt with all candidates, for `gorgo learn`."
    ),
]
PolicyName = Annotated[str | None, typer.Option(metavar="NAME", help="Routing policy; see `gorgo policies`.")]


class RunFrontEnd(Protocol):
    """The server of a front end."""

    def __call__(
        self, config: Config, options: ProcessOptions, *, ready: Callable[[ServerAddresses], None]
    ) -> Coroutine[Any, Any, None]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """One start: the text of regions.yaml with the options of the command line.

    `config` is the file, or `--replica` where no file is followed. `plain`: without httptools and uvloop.
    """

    config: Path
    text: bytes
    overrides: Overrides
    state: Path | None
    request_log: Path | None
    outcome_log: Path | None
    seed: int | None
    log_format: Literal["json", "text"]
    log_level: str
    plain: bool = False

    def validate(self) -> ValidConfig:
        """Return the configuration. Raises `ConfigError` with every error."""
        from gorgo.cli.validation import validate

        return validate(self.text, source=self.config, overrides=self.overrides)

    def run(self, started: ValidConfig, front_end: RunFrontEnd, shown: Callable[[ServerAddresses], str]) -> None:
        """Run the process until a signal; print the line `shown` once requests can be routed."""
        import secrets

        run = _loop_runner(plain=self.plain)

        from gorgo.cli.validation import validate
        from gorgo.live.control.state_file import StateFile
        from gorgo.live.logs import log_config_warnings, set_up_logs
        from gorgo.live.process import ProcessOptions
        from gorgo.live.reload.file_watch import ConfigFile

        overrides = self.overrides
        # A weights file is read once and takes precedence over regions.yaml at each reload too. Addresses need a
        # restart.
        pinned = None if overrides.weights_file is None else (started.policy, started.weights)
        at_reload = replace(overrides, weights_file=None, pinned=pinned, ports=False)

        def parse(text: bytes) -> Config:
            """Return the configuration with the options of the command line, at each reload."""
            return validate(text, source=self.config, overrides=at_reload).config

        def ready(addresses: ServerAddresses) -> None:
            freeze_startup_objects()
            typer.echo(shown(addresses))

        admin_token = overrides.admin_token
        if admin_token is None:
            admin_token, words = made_admin_token(self.state)
            typer.echo(f"gorgo: GORGO_ADMIN_TOKEN is not set: {words}", err=True)
        set_up_logs(self.log_format, self.log_level)
        log_config_warnings(started.config)
        # With --seed the key of fingerprints repeats too, for comparisons; without, clients cannot guess it.
        drawn = secrets.randbits(63) if self.seed is None else self.seed
        options = ProcessOptions(
            policy=started.policy,
            weights=started.weights,
            admin_token=admin_token,
            metrics_token=overrides.metrics_token,
            environ=os.environ,
            key=drawn,
            seed=drawn,
            # A pipe can be read only once.
            file=ConfigFile(self.config, parse, self.text) if self.config.is_file() else None,
            state_file=None if self.state is None else StateFile(self.state),
            request_log=self.request_log,
            outcome_log=self.outcome_log,
            plain=self.plain,
        )
        # The process handles the signals itself: a second one ends its grace period.
        run(front_end(started.config, options, ready=ready))


def _loop_runner(*, plain: bool) -> Callable[[Coroutine[Any, Any, None]], object]:
    """Return what runs the process: uvloop, or with `plain` asyncio's loop. Raises `ConfigError` without its parts."""
    if plain:
        import asyncio

        return asyncio.run
    try:
        import httptools  # noqa: F401 - for the listener, which is loaded later
        import uvloop
    except ImportError as error:
        expected = "httptools and uvloop, or `gorgo serve --plain`, which is slower and needs neither"
        raise InvalidValueError("this Python", str(error), expected) from error
    return uvloop.run


# The admin token of a process that was given none.


#: Behind the name of the state file, whose folder the process may write to.
TOKEN_SUFFIX = ".token"
#: Random bytes of a token: 192 bits, in 32 characters.
TOKEN_BYTES = 24
#: The command line's own bound for a token that is given, in characters; a file of less was cut off.
_TOKEN_CHARS = 32


def made_admin_token(state: Path | None) -> tuple[str, str]:
    """Return an admin token, and words for the operator.

    Beside a state file it is kept in a file that only its owner can read, so that a restart has the same. Without one,
    or where that file cannot be written, it ends with the process.
    """
    import secrets

    from gorgo.config.atomic import PRIVATE, write_atomically

    token = secrets.token_urlsafe(TOKEN_BYTES)
    made = f"made the token {token}"
    if state is None:
        return token, f"{made} for this process; --state FILE keeps one"
    path = state.with_name(state.name + TOKEN_SUFFIX)
    advice = f"for other commands: export GORGO_ADMIN_TOKEN_FILE={path}"
    try:
        path.chmod(PRIVATE)
        stored = path.read_text(encoding="ascii").strip()
        if len(stored) == _TOKEN_CHARS and stored.isprintable() and " " not in stored:
            return stored, f"the token is that of {path}; {advice}"
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:
        return token, f"{made} for this process, because {path} cannot be read: {error}"
    try:
        write_atomically(path, f"{token}\n".encode("ascii"), mode=PRIVATE)
    except OSError as error:
        return token, f"{made} for this process, because {path} cannot be written: {error}"
    return token, f"{made}; {advice}"


# The garbage collector: objects of the start are frozen, and collections are rare.
#
# The setting is the process's, so only the command line calls `freeze_startup_objects`. A full collection takes 10 to
# 20 ms, in which no stream proceeds.
#
# Why it is safe: nothing large depends on the collector. Bodies and chunks are freed by their last reference, however a
# request ends (tests/cli/test_launch.py). Closed connections are cycles of about 30 objects each. A frozen object in a
# cycle is never freed, as of a replica that a reload removes; there are only as many as at the start.


#: New objects before a collection of the youngest generation; 700 by default.
YOUNG_OBJECTS = 5_000
#: Collections of the youngest generation before one of the middle one, as by default.
MIDDLE_RUNS = 10
#: Collections of the middle generation before a full one, which then has at most 150,000 new objects: 10 to 17 ms.
#: By default half a million would take 41 to 53 ms. At worst 5,000 closed connections wait for it, well below 70 MB.
FULL_RUNS = 3


def freeze_startup_objects() -> None:
    """Freeze all objects, set the thresholds and enable the collector; call once, after set-up.

    What the start dropped in cycles stays too: 2 % of the objects, for which a full collection would take a tenth of
    the start.
    """
    gc.freeze()
    gc.enable()
    gc.set_threshold(YOUNG_OBJECTS, MIDDLE_RUNS, FULL_RUNS)
