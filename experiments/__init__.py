"""Experiments: published routing systems and this project's own claims, run again in simulation.

`python -m experiments` compares five published systems; `--only GROUP` prints the tables of one group of runs. Nothing
in `gorgo` or `tuner` imports this package, and no wheel contains it.
"""
