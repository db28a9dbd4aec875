"""gRPC for the picker: methods as streams of serialized messages, and the servers that carry them."""
