"""Open-loop replay of a trace over plain OpenAI HTTP."""

from gorgo.apps.replay.options import ReplayOptions, ReplayReport
from gorgo.apps.replay.run import replay, replay_command

__all__ = ["ReplayOptions", "ReplayReport", "replay", "replay_command"]
