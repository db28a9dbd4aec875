"""`python -m gorgo`: the same as the `gorgo` command."""

from gorgo.cli import main

main()
