"""Learned routers beside their published figures: `python -m gorgo.apps.learned_routers`."""
