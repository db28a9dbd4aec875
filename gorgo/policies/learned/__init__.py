"""Policies that choose by a trained model, and the guards that decide where a model should not."""
