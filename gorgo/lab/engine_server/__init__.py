"""`gorgo engine`: the engine model of `gorgo.lab.sim` over HTTP, as an SGLang or vLLM replica at a distance."""

from __future__ import annotations

from gorgo.lab.engine_server.server import run_engine

__all__ = ["run_engine"]
