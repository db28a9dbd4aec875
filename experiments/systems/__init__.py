"""The rows of each published system, and of this project's own claims.

A system is a module with a `NAME` for `--system`, a `TITLE`, the names of its `GROUPS` for `--only`, and
`report(groups, grid, runner)`, which runs some groups and returns their tables. One with published figures also has
`claims(grid)`, which returns each of them as a row of the comparison.
"""
