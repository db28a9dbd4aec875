"""`gorgo whatif`: what a policy or a weight set would have done to the decisions of a log."""

from gorgo.lab.whatif.judge import JudgedLog, JudgedOutcome, Judgement, check_replayable

__all__ = ["JudgedLog", "JudgedOutcome", "Judgement", "check_replayable"]
