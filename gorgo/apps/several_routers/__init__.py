"""Several routers over one fleet, alone, with a store and as one: `python -m gorgo.apps.several_routers`."""
