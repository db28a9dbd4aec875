"""Network: links and connections in virtual time."""
