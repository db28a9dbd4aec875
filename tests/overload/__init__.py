"""`make overload-live`: a real proxy and real engines beyond their capacity, beside the same load simulated.

`window.py` is what is sent, `simulated.py` capacity and virtual time, `fleet.py` the processes, `live.py` one run over
HTTP, `obeying.py` clients that come back when they are told to, `show.py` the tables.
"""
