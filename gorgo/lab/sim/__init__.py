"""Simulation: replicas over the network, their engines, faults and the Router, in virtual time."""
