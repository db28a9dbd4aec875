"""The roles of a call: a request, and the first token of an answer."""
