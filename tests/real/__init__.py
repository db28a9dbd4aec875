"""The proxy before engines that nobody here wrote: llama.cpp servers with a tiny model made on the spot."""
