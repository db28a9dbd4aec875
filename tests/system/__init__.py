"""Tests that need apt, root or gigabytes; `make test-system` runs them and says what it skipped."""
