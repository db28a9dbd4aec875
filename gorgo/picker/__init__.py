"""The front end behind Envoy: an endpoint picker (ext_proc), which decides and carries no answer of its own."""
