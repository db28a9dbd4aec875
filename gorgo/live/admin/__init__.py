"""Admin listener: the operator's routes and the status page."""
