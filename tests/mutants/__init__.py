"""`make mutants`: one small fault at a time in the code that decides, and whether any test sees it.

`mutations` lists what can be changed, `reach` which test runs which line, `choice` draws mutants and chooses tests,
`trial` runs them on a private copy of the tree, `report` shows what is left alive. `known.toml` has faults that tests
once missed; `equivalent.toml` has changes that make no difference, with the reason.
"""
