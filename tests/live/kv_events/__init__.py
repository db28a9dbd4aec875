"""KV events: feeds, subscriptions over real sockets, configuration."""
