"""Parsing: bodies of requests, read in this process or in another."""
