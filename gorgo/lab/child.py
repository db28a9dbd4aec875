"""`python -m gorgo.lab.child ...`: the `gorgo` command as a child that ends with its parent.

The parent passes the read end of a pipe as stdin and keeps the write end, which the operating system closes however the
parent ends, also by SIGKILL. Then the child sends itself SIGTERM, and SIGKILL if it has not ended in time.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import threading
import time

#: As a parent gives its processes between SIGTERM and SIGKILL.
GRACE_S = 5.0
_STDIN = 0


def main() -> None:
    threading.Thread(target=_end_with_parent, name="parent-watch", daemon=True).start()
    sys.argv[0] = "gorgo"
    runpy.run_module("gorgo", run_name="__main__")


def _end_with_parent() -> None:
    os.read(_STDIN, 1)  # The parent writes nothing: returns at the end of the pipe.
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE_S)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
