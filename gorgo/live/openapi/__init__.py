"""OpenAPI: the documents of both listeners."""
