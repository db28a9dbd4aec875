"""`python -m tuner.evidence`: runs what is missing and prints the table."""

from __future__ import annotations

import sys

from tuner.evidence.command import main

sys.exit(main())
