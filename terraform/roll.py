"""Applies a change that replaces the routers' machines, one machine at a time.

Terraform replaces the machines of one resource at once. With two routers this script applies each with what belongs to
it, and goes on once the balancer sends it clients again; at last it applies the rest. It stops at the first failure:
the other router then serves on.

    python terraform/roll.py                 # asks before each apply, as terraform does
    python terraform/roll.py --yes
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
#: What belongs to one machine; each has the machine's name as its key.
PARTS = ("aws_instance.this", "aws_eip_association.this", "aws_volume_attachment.history")
BALANCED = ("aws_lb_target_group_attachment.routers", "aws_lb_target_group_attachment.metrics")


class RollError(Exception):
    """There is nothing to roll, or a command has failed."""


def targets(name: str, *, has_history: bool) -> list[str]:
    """Return the options of `terraform apply` for one machine."""
    parts = [part for part in PARTS if has_history or "history" not in part]
    found = [f"module.router.{part}" for part in parts] + [f"module.balancer[0].{part}" for part in BALANCED]
    return [f'-target={place}["{name}"]' for place in found]


def roll(environment: Path, *, yes: bool) -> None:
    """Apply to each router in turn, then to the rest. Raises `RollError`."""
    apply = ["terraform", f"-chdir={environment}", "apply", "-input=false", *(["-auto-approve"] if yes else [])]
    group = _output(environment, "router_target_group_arn")
    if group is None:
        raise RollError("one router has no other that could serve meanwhile: use `terraform apply`")
    region, has_history = _output(environment, "secret_names")["place"], _output(environment, "router_has_history")
    for name in sorted(_output(environment, "router_instance_ids")):
        _run([*apply, *targets(name, has_history=has_history)])
        machine = _output(environment, "router_instance_ids")[name]
        wait = ["aws", "elbv2", "wait", "target-in-service", "--region", region]
        _run([*wait, "--target-group-arn", group, "--targets", f"Id={machine}"])
        sys.stdout.write(f"{name}: in service\n")
        sys.stdout.flush()
    _run(apply)


def _output(environment: Path, name: str) -> Any:
    command = ["terraform", f"-chdir={environment}", "output", "-json", name]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RollError(f"terraform output {name}: {done.stderr.strip()}; expected an environment that was applied")
    return json.loads(done.stdout)


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, check=False)
    if done.returncode:
        raise RollError(f"{' '.join(command[:3])} ended with {done.returncode}; the routers after it are as they were")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--yes", action="store_true", help="do not ask before each apply")
    parser.add_argument("--environment", type=Path, default=HERE / "envs" / "paper", help="folder that was applied")
    options = parser.parse_args(arguments)
    try:
        roll(options.environment, yes=options.yes)
    except RollError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
