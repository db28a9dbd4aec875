"""Differential fuzz: the readers of requests and of responses beside h11, on seeded bytes in any pieces.

`odd_bytes` makes faults and cuts, `framing`, `requests` and `responses` say what items consist of, `reader` and
`client` read them by both means, `fuzz` runs and minimises. `python -m tests.attacks.differential` is the long form.
"""
