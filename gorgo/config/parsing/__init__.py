"""YAML text to plain data: variables, the line of each value, and every error with its place."""
