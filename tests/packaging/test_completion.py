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
for line in "$@"; do
  COMP_WORDS=($line)
  if [[ $line == *' ' ]]; then COMP_WORDS+=(''); fi
  COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
  $FUNCTION gorgo
  echo "${COMPREPLY[*]}"
done
"""


@pytest.fixture
def bash() -> str:
    found = shutil.which("bash")
    if found is None:
        pytest.skip("COMPLETION TEST SKIPPED: there is no bash on the PATH")
    return found


def test_bash_completes_commands_options_and_commands_of_two_words(bash: str) -> None:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environ = os.environ | {"PATH": path, "FUNCTION": "_gorgo_completion"}
    lines = ["gorgo fre", "gorgo serve --admin", "gorgo datasets "]
    done = subprocess.run([bash, "-c", ASK, "bash", *lines], env=environ, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == ["freeze", "--admin-bind", "list describe generate fetch"]
