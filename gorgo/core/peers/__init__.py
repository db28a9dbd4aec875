"""Reports between the routers of one fleet: their records, wire form and exchange."""
