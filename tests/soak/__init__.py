"""`make soak`: a hundred thousand short requests beside five hundred slow streams, and what is left of them.

`run.py` is the order of things, `load.py` the clients, `engine.py` the engines, `served.py` the proxy with a window on
what it holds, `ledgers.py` what is seen through it, `verdict.py` what is demanded.
"""
