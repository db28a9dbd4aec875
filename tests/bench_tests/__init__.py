"""Tests of the benchmarks' own arithmetic and parsing; what they measure is not tested."""
