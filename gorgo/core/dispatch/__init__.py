"""Dispatch: choose and reserve a replica, and follow each attempt to its end."""
