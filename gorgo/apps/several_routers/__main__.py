"""`python -m gorgo.apps.several_routers`."""

from __future__ import annotations

import os
import sys

# Before numpy is loaded: sums do not depend on the number of threads.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from gorgo.apps.several_routers.command import main

sys.exit(main())
