"""Several `gorgo serve` over one fleet of simulated engines, with and without a store, beside the simulation."""
