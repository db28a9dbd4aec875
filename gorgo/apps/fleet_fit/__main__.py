"""`python -m gorgo.apps.fleet_fit`."""

from __future__ import annotations

import sys

from gorgo.apps.fleet_fit.command import main

sys.exit(main())
