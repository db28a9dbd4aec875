"""The live shell below its front ends: the Router with its replicas, time, settings and reports."""
