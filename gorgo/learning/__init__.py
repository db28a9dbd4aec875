"""Training of the models that learned policies score replicas by: buffers of outcomes, fits, model files.

Owns the mathematics, in numpy. Leaves features and outcomes to `gorgo.core.training`, decisions to the policies, and
time, processes and disks to the shells. Chance is a seed: the same rows, settings and seed make the same model.
"""
