"""Routing policies; the registry names them."""
