"""The fit of a simulated fleet to the GORGO paper's, and the paper's tables beside the simulated ones."""
