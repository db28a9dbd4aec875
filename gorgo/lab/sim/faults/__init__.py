"""Faults: kinds of fault, named scenarios and their injection."""
