"""Messages of ext_proc and of the access log: bytes to facts, and answers to bytes."""
