"""gRPC for the picker: methods as streams of serialized messages, and the server that carries them."""
