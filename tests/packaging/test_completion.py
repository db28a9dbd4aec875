"""Shell completion, in a bash that has sourced what `gorgo --show-completion` says there."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

#: What bash does at a TAB: the words so far, which of them the cursor is at, and the function that was named for it.
ASK = """
set -eu
source <(gorgo --show-completion)
[[ $(complete -p gorgo) == *"-F $FUNCTION gorgo" ]]
COMP_WORDS=("$@")
COMP_CWORD=$(($# - 1))
$FUNCTION gorgo
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture
def bash() -> str:
    found = shutil.which("bash")
    if found is None:
        pytest.skip("COMPLETION TEST SKIPPED: there is no bash on the PATH")
    return found


def completed(bash: str, *words: str) -> list[str]:
    """What bash would offer for the last of the words."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environ = os.environ | {"PATH": path, "FUNCTION": "_gorgo_completion"}
    command = [bash, "-c", ASK, "bash", *words]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_bash_completes_commands_options_and_commands_of_two_words(bash: str) -> None:
    assert completed(bash, "gorgo", "fre") == ["freeze"]
    assert completed(bash, "gorgo", "serve", "--admin") == ["--admin-bind"]
    assert completed(bash, "gorgo", "datasets", "") == ["list", "describe", "generate", "fetch"]
