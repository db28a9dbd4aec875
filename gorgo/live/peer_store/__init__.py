"""The store in which routers of one group report to each other."""
