"""Reports of engines' KV caches in virtual time: events and pushes on their way to the Router."""
