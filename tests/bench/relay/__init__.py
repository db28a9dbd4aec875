"""What the relay costs, against the engine itself, nginx and sglang-router in the same run.

`bench` runs it; `scenarios` says what is measured, `targets` against what, `report` how figures come of it. `engine`
and `load` are processes of their own, `wire` is what they say to each other, `profile` shows where the time goes.
"""
