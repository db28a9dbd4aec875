"""Opens the soak's window in each worker of `gorgo serve --processes`, which starts with a command line of its own.

On the path of Python by `PYTHONPATH`, so that an interpreter runs it at its start.
"""

import os
import signal
from pathlib import Path

if "GORGO_WORKER" in os.environ:
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # a spare one holds nothing
    from tests.soak.served import Window

    Window(Path(os.environ["GORGO_SOAK_WINDOWS"]) / f"{os.getpid()}.json").open_here()
