"""One connection of a client: requests in, responses out, over HTTP/1.1."""
