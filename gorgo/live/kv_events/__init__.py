"""KV cache events of engines over ZeroMQ: subscribers, replays, and the states of their feeds."""
