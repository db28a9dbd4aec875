"""Which rows a round trains on: bounded buffers of outcomes, and the rules by which a row stays."""
