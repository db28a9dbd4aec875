"""What `gorgo picker` costs behind a real Envoy, beside the same Envoy without filters and beside `gorgo serve`.

`bench` runs it on the engine and the load of `tests.bench.relay`; `targets` says how each is started, `replay` calls
pickers without an Envoy, `report` prints the tables.
"""
