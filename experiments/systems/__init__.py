"""One module per published system, and those of this project's own claims: their rows."""
