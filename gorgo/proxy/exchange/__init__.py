"""Exchange: one client request from its head to the last byte of its response."""
