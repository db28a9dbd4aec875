"""The store: configuration, connections, the service over a real server."""
