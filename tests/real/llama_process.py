"""The program of a llama.cpp server's process: serves one GGUF file on loopback until SIGTERM.

Prints `listening URL` when it answers. Run by `llama_server.py` in a process of its own,
because the server is C++ with threads and sockets that a test cannot take down within its process.
"""

from __future__ import annotations

import argparse
import importlib
import signal
import sys
from typing import Any


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--slots", type=int, required=True, help="requests at once")
    parser.add_argument("--context", type=int, required=True, help="KV cells in all, shared evenly by the slots")
    parser.add_argument("--port", type=int, default=0, help="a free one by default")
    parser.add_argument("--cache-mib", type=int, default=64, help="for sequences that have left their slots")
    parser.add_argument("--no-metrics", action="store_true")
    asked = parser.parse_args()
    stop = {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, stop)
    server = _server(asked)
    sys.stdout.write(f"listening {server.listening_address}\n")
    sys.stdout.flush()
    signal.sigwait(stop)
    del server


def _server(asked: argparse.Namespace) -> Any:
    # By name, because the wheel exists for some platforms only and brings no types.
    llama = importlib.import_module("xllamacpp")
    parameters = llama.CommonParams()
    parameters.model.path = asked.model
    parameters.model_alias = {"tiny"}
    parameters.hostnames = ["127.0.0.1"]
    parameters.port = asked.port
    parameters.n_parallel = asked.slots
    parameters.n_ctx = asked.context
    parameters.cpuparams.n_threads = parameters.cpuparams_batch.n_threads = 1
    parameters.n_threads_http = 8
    parameters.cache_ram_mib = asked.cache_mib
    parameters.endpoint_metrics = not asked.no_metrics
    parameters.endpoint_slots = True
    parameters.warmup = False
    return llama.Server(parameters)


if __name__ == "__main__":
    main()
