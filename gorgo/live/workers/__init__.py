"""Several processes that serve one listener as one router: their parent, and what passes between them."""
