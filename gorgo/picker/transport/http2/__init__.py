"""HTTP/2 of a gRPC server: frames, flow control and calls, without a library's cost per frame."""
