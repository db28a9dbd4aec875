"""HTTP of both front ends: errors, headers, bodies, keys of clients, TLS."""
