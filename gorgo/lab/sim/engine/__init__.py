"""Engine: the simulated engine's scheduler, KV cache and timing."""
