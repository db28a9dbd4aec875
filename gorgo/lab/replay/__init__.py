"""Open-loop replay of a trace over plain OpenAI HTTP."""

from gorgo.lab.replay.options import ReplayOptions, ReplayReport
from gorgo.lab.replay.run import replay, replay_command

__all__ = ["ReplayOptions", "ReplayReport", "replay", "replay_command"]
