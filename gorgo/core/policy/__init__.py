"""Policy: the interface that every routing policy implements, with candidates, cost and weights."""
