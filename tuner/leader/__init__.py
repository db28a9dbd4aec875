"""Which of several tuner processes changes weights: one leads, the others wait."""
