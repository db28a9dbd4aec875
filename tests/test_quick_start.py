"""The quick start by hand, pasted into bash as a whole: all of it arrives before its first command has ended."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

from tests.documents import ROOT, blocks, section
from tests.packaging.guide import own_ports, with_ports

#: Three engines, a proxy and a replay of six seconds on two busy cores.
TIMEOUT_S = 120.0
INSTALL = "python3 -m venv /tmp/gorgo && . /tmp/gorgo/bin/activate && pip install .\n"


def shell(script: str, folder: Path, environ: dict[str, str]) -> tuple[int, str]:
    """Type `script` into bash; return the exit code and what the terminal shows. Nothing is left running."""
    process = subprocess.Popen(
        ["bash", "--norc", "--noprofile"],
        cwd=folder,
        env=environ,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        printed, _ = process.communicate(script, timeout=TIMEOUT_S)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    return process.returncode, printed


def test_quick_start_can_be_pasted_and_one_line_stops_it(tmp_path: Path) -> None:
    text = section((ROOT / "docs/README.md").read_text(), "## Quick start by hand")
    pasted = blocks(text, "sh")[0]
    (stop,) = re.findall(r"`(.*)` stops all of it", text)
    assert pasted.startswith(INSTALL)
    assert "#" not in pasted, "an interactive zsh takes a comment for words"

    ports = own_ports()
    (tmp_path / "regions.yaml").write_text(with_ports((ROOT / "regions.yaml").read_text(), ports))
    (tmp_path / "bin").mkdir()
    command = tmp_path / "bin/gorgo"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m gorgo "$@"\n')
    command.chmod(0o755)
    environ = {name: value for name, value in os.environ.items() if not name.startswith("GORGO_")} | {
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "GORGO_SERVE_BIND": f"127.0.0.1:{ports[8080]}",
        "GORGO_SERVE_ADMIN_BIND": f"127.0.0.1:{ports[9090]}",
        "GORGO_REPLAY_URL": f"http://127.0.0.1:{ports[8080]}",
        "GORGO_ADMIN_URL": f"http://127.0.0.1:{ports[9090]}",
    }
    script = with_ports(pasted.removeprefix(INSTALL), ports)
    # `wait` ends when all that the paste has started has ended.
    code, printed = shell(f"{script}{stop}\nwait\necho all stopped\n", tmp_path, environ)

    assert code == 0, printed
    assert "regions.yaml: ok, 3 replicas in 3 regions, policy gorgo-ms" in printed
    assert re.search(r"^gorgo-ms +0 +\d", printed, re.MULTILINE), printed  # no request failed
    assert "50/50 done, 0 in flight, 0 errors" in printed
    assert all(re.search(rf"{name} +ready", printed) for name in ("us-ashburn-0", "eu-frankfurt-0", "ap-seoul-0")), (
        printed
    )
    assert printed.endswith("all stopped\n")
    assert "listening on" not in printed, "logs go to files"
    assert "Failed to connect" not in printed, "waiting is silent"
    logs = [
        (tmp_path / f"{name}.log").read_text() for name in ("proxy", "us-ashburn-0", "eu-frankfurt-0", "ap-seoul-0")
    ]
    assert all("listening on" in log for log in logs)
    assert not [line for line in [printed, *logs] if "Traceback" in line]
