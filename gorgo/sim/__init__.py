"""The engine model and its network, in virtual time."""
