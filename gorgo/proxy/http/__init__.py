"""HTTP: the client side of the data and admin listeners."""
