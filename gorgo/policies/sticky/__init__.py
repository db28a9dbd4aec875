"""Policies that send a prompt where its beginning was served before."""
