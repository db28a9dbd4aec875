"""The JSON of each API's responses: one module per API, each with a `ResponseFormat` of `streams`."""
