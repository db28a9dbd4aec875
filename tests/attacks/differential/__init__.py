"""Differential fuzz: the reader of requests beside h11, on seeded bytes in any pieces.

`odd_bytes` makes faults and cuts, `framing` and `requests` say what items consist of, `reader` reads them by both
means, `fuzz` runs and minimises. `python -m tests.attacks.differential` is the long form.
"""
