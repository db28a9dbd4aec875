"""The command line, and the only place where things are put together: reads the environment, opens files, runs loops.

One module per command, or per few that are one subject: `serve` (with `gorgo picker`), `engine`, `check`, `policies`,
`learn` and `tune` here, those that call the admin listener in `admin`, those that measure in `measure`. `app` joins
them, `errors` turns errors into exit codes, `options` has the options that several commands share, `policies` makes a
policy with its weights from configuration and options. Heavy imports are inside the commands, so that `gorgo --help` is
quick.
"""

from gorgo.cli.app import app, main

__all__ = ["app", "main"]
