"""Sources of what a router knows of caches, side by side: `python -m gorgo.apps.cache_sources`."""
