"""A first-hour guide as a program: its commands, run in order in one shell, and what it says they print.

A block that begins with ```sh is typed; a block ```text right behind it is what the terminal then shows. Words after
`sh` are programs without which the rest of the section is left out (`sh terraform`). In what is shown a figure stands
for any figure, `…` for anything on its line, and a line of nothing but `…` for any lines; blanks count as one.

Owns reading, running and comparing. The shell is bash, the ports are replaced by free ones, and everything that the
guide leaves running is stopped, by its process group.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.ports import free_ports

#: What guides listen on: data, admin, the tuner's figures, the picker, three engines, Prometheus.
PORTS = (8080, 9090, 9091, 9002, 30000, 30001, 30002, 9095)
_BLOCK = re.compile(r"^```sh(?P<needs>[^\n]*)\n(?P<typed>.*?)^```\n(?:\n```text\n(?P<shown>.*?)^```\n)?", re.M | re.S)
_SECTION = re.compile(r"^## ", re.MULTILINE)
_FIGURE = re.compile(r"(?<![\w.])[-+]?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?|(?<=[a-z=:/-])\d+(?:\.\d+)?", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Step:
    """A block of commands; `shown` is None where the guide does not say what they print."""

    typed: str
    shown: str | None
    #: Programs without which it cannot be run.
    needs: tuple[str, ...]
    line: int

    def missing(self) -> list[str]:
        return [name for name in self.needs if shutil.which(name) is None]


@dataclass(frozen=True, slots=True)
class Done:
    """What a step printed, both streams as a terminal has them, and its exit code."""

    step: Step
    printed: str
    code: int

    def fault(self) -> str | None:
        """What differs from the guide, or None."""
        if self.code:
            return f"line {self.step.line}: exit code {self.code}\n{self.step.typed}\n{self.printed}"
        if self.step.shown is None or agrees(self.step.shown, self.printed):
            return None
        return f"line {self.step.line}: the guide says\n{self.step.shown}\nbut what was printed is\n{self.printed}"


def steps(text: str) -> list[Step]:
    """All of a guide, in order."""
    return [
        Step(found["typed"], found["shown"], tuple(found["needs"].split()), text[: found.start()].count("\n") + 1)
        for found in _BLOCK.finditer(text)
    ]


def agrees(shown: str, printed: str) -> bool:
    """Whether what was printed is what the guide shows, figures and `…` apart."""
    pattern = "".join(_pattern(line) for line in _lines(shown))
    return re.fullmatch(pattern, "".join(f"{line}\n" for line in _lines(printed))) is not None


def _lines(text: str) -> list[str]:
    """Blanks and rules as one, figures as `#`, no blank lines: tables are as wide as their figures."""
    lines = (_FIGURE.sub("#", re.sub(r"─+", "─", " ".join(line.split()))) for line in text.splitlines())
    return [line for line in lines if line]


def _pattern(line: str) -> str:
    if line == "…":
        return r"(?:.*\n)*?"
    return r".*".join(re.escape(part) for part in line.split("…")) + r"\n"


def own_ports() -> dict[int, int]:
    """Return a port that nobody has for each of a guide's."""
    return dict(zip(PORTS, free_ports(len(PORTS)), strict=True))


def with_ports(text: str, ports: dict[int, int]) -> str:
    return re.sub(r"(?<![\d.])\d{4,5}\b", lambda found: str(ports.get(int(found[0]), found[0])), text)


def run(todo: Sequence[Step], *, clone: Path, records: Path, environ: dict[str, str], timeout_s: float) -> list[Done]:
    """Types all steps into one shell that begins in `clone`; the first that fails, or takes too long, is the last.

    The clone's own regions.yaml gets the ports too: guides copy it.
    """
    ports = own_ports()
    regions = clone / "regions.yaml"
    regions.write_text(with_ports(regions.read_text(), ports))
    script = []
    for number, step in enumerate(todo):
        (records / f"{number}.sh").write_text(with_ports(step.typed, ports))
        base = records / str(number)
        script.append(f". {base}.sh > {base}.out 2>&1; code=$?; echo $code > {base}.code; [[ $code = 0 ]] || exit 1")
    (records / "all.sh").write_text("\n".join(script) + "\n")
    shell = subprocess.Popen(
        ["bash", str(records / "all.sh")], cwd=clone, env=environ, stdin=subprocess.DEVNULL, start_new_session=True
    )
    try:
        with contextlib.suppress(subprocess.TimeoutExpired):
            shell.wait(timeout_s)
    finally:
        _stop_group(shell.pid)
        shell.wait()
    return [_done(step, records / str(number)) for number, step in enumerate(todo)]


def _done(step: Step, base: Path) -> Done:
    out, code = base.with_suffix(".out"), base.with_suffix(".code")
    printed = out.read_text() if out.exists() else "(not reached)"
    return Done(step, printed, int(code.read_text()) if code.exists() else 1)


def _stop_group(group: int) -> None:
    """Of a session of its own, so that nothing else is in it."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(group, number)
        except ProcessLookupError:
            return
        if number == signal.SIGTERM:
            _wait_for_group(group)


def _wait_for_group(group: int, *, tries: int = 100) -> None:
    for _ in range(tries):
        if not _alive(group):
            return
        subprocess.run(["sleep", "0.1"], check=True)


def _alive(group: int) -> bool:
    """Whether any process of the group is more than a zombie."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, its_group = path.read_text().rpartition(")")[2].split()[:3]
        except (OSError, ValueError):
            continue
        if int(its_group) == group and state != "Z":
            return True
    return False
