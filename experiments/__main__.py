"""`python -m experiments`."""

from __future__ import annotations

import os
import sys

# Before numpy is loaded: small products are faster with one thread, and sums do not depend on the number of threads.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from experiments.command import main

sys.exit(main())
