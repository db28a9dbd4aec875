"""The pure core: what decides, without sockets, clocks or chance of its own."""
