"""One exchange behind Envoy: its decision, what is seen of its answer, its outcome."""
