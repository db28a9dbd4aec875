"""Several proxies as one: their samples merged, weights put to all or to none."""
