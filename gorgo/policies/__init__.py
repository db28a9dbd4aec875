"""Routing policies, one file each; the registry names them."""
