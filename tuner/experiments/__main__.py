"""`python -m tuner.experiments`: runs what is missing and prints the table."""

from __future__ import annotations

import sys

from tuner.experiments.command import main

sys.exit(main())
