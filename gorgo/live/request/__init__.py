"""A request before its decision: body, options, client, and what an answer to it means; its records at the end."""
