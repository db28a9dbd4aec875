"""Open-loop replay of a trace over plain OpenAI HTTP."""

from gorgo.apps.replay.options import ReplayOptions, ReplayReport

__all__ = ["ReplayOptions", "ReplayReport"]
