"""Values that no file sets, each with its reason. The proxy and the simulator read the same ones."""

from __future__ import annotations

#: Text per block of the proxy's prefix index: 64 tokens of 4 bytes.
BLOCK_BYTES = 256
#: `models[].tokenizer` of simulated engines, which count four bytes of text as a token.
SIMULATED_TOKENIZER = "simulated"
#: A probe or scrape is stale after this many intervals: one that is lost changes nothing.
STALE_INTERVALS = 3
#: A far replica on a new TLS connection answers a ping within 1 s. A slower one counts as down.
PROBE_TIMEOUT_S = 5.0
#: Idle connections per replica that pings keep warm: the first requests of a burst save a round trip, two with TLS.
WARM_CONNECTIONS = 2
#: Idle time of a connection to a replica, s. The shortest keep-alive in use is 5 s (uvicorn, so SGLang and vLLM); the
#: rest is the round trip of a far replica.
REPLICA_KEEP_ALIVE_S = 4.0
#: Two warm-ups within the idle time of a connection.
WARM_INTERVAL_S = REPLICA_KEEP_ALIVE_S / 2
#: Round trip from which the kernel's retransmission time-out is derived. That time-out is 0.2 to 0.4 s on any path, so
#: another value moves the estimate of an idle connection's window by less than a second.
ASSUMED_RTT_S = 0.1
#: Defaults of `limits.connections_per_replica` and `limits.first_token_timeout_s`; a simulation knows no other values.
CONNECTIONS_PER_REPLICA = 1024
FIRST_TOKEN_TIMEOUT_S = 120.0
#: Shortest token of the admin listener: 16 letters and digits at random are 95 bits; a word is guessed.
MIN_TOKEN_CHARS = 16
