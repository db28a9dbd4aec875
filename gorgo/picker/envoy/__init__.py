"""Envoy's configuration for a picker of its own: `gorgo picker --print-envoy`."""
