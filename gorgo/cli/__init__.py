"""The command line, and the only place where things are put together: reads the environment, opens files, runs loops.

One module per group of commands: `running` (serve, engine), `measuring` (replay, demo), `looking` (check, policies,
status), `datasets`. `app` joins them, `failures` turns errors into exit codes, `options` holds the options that several
commands share, `wiring` makes a policy with its weights out of configuration and options. Heavy imports are inside the
commands, so that `gorgo --help` is quick.
"""

from gorgo.cli.app import app, main

__all__ = ["app", "main"]
