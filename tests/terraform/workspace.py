"""A copy of terraform/ in which terraform may write, and what it answers there.

Owns how terraform is run: offline, without the machine's own CLI configuration, quietly.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
#: What terraform may leave in a folder; a copy begins without.
_LEFT = shutil.ignore_patterns(".terraform", "*.tfstate*", "generated", "__pycache__")

_CORE = """
module "core" {
  source        = "./modules/core"
  name          = "gorgo-paper"
  regions_file  = "../regions.yaml"
  places        = yamldecode(file("envs/paper/places.yaml"))
  model         = { repository = "Qwen/Qwen3.5-35B-A3B-FP8", served_name = "qwen3.5-35b-a3b" }
  engine_image  = "lmsysorg/sglang:v0.5.23@sha256:5555555555555555555555555555555555555555555555555555555555555555"
  secrets       = { prefix = "/gorgo/paper" }
  server_name   = "llm.example.org"
  metrics_cidrs = ["203.0.113.0/24"]
  package = {
    wheel       = "gorgo_router-0.2.0-py3-none-any.whl"
    sha256      = sha256("wheel")
    lock_sha256 = sha256("lock")
  }
  artefacts     = "s3://gorgo-paper"
}
"""

_STORE = 'routers = 2\n  grouped = true\n  store = { enabled = true, address = "store.internal" }\n  artefacts'
_PAIR = _CORE.replace('"core"', '"pair"').replace("artefacts", _STORE)

#: A root module that renders everything without a provider: one router, and two with a store and replicas in groups.
RENDER = (
    _CORE
    + _PAIR
    + """
module "observability" {
  source      = "./modules/observability"
  server_name = "llm.example.org"
  scraped     = module.core.scraped
}

module "files" {
  source = "./modules/files"
  folder = "written"
  texts  = merge({ "regions.generated.yaml" = module.core.regions_generated }, module.observability.files)
}

output "core" { value = module.core }
output "pair" { value = module.pair }
output "observability" { value = module.observability.files }
"""
)


@dataclass(frozen=True, slots=True)
class Workspace:
    """`folder` holds `terraform/` and what its environment reads beside it."""

    folder: Path
    environ: dict[str, str] = field(default_factory=dict)

    @classmethod
    def copied(cls, folder: Path, **environ: str) -> Workspace:
        shutil.copytree(ROOT / "terraform", folder / "terraform", ignore=_LEFT)
        for name in ("regions.yaml", "requirements.lock"):
            shutil.copy(ROOT / name, folder / name)
        return cls(folder, environ)

    def terraform(self, *arguments: str, at: str = "terraform", timeout_s: float = 900) -> str:
        """Its standard output; an `AssertionError` with all that it said where it failed."""
        done = self.attempt(*arguments, at=at, timeout_s=timeout_s)
        said = f"terraform {' '.join(arguments)}: {done.returncode}\n{done.stdout[-6000:]}{done.stderr[-3000:]}"
        assert done.returncode == 0, said
        return done.stdout

    def attempt(
        self, *arguments: str, at: str = "terraform", timeout_s: float = 900
    ) -> subprocess.CompletedProcess[str]:
        # An empty CLI configuration instead of the machine's; no question to its maker whether there is a newer one.
        quiet = {"TF_CLI_CONFIG_FILE": os.devnull, "CHECKPOINT_DISABLE": "1", "TF_IN_AUTOMATION": "1", "TF_INPUT": "0"}
        return subprocess.run(
            ["terraform", *arguments],
            cwd=self.folder / at,
            env=os.environ | quiet | self.environ,
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout_s,
        )

    def rendered(self) -> dict[str, Any]:
        """Everything that the provider-free modules make of the paper's fleet."""
        (self.folder / "terraform" / "render.tf").write_text(RENDER)
        self.terraform("init", "-backend=false")
        self.terraform("apply", "-auto-approve")
        outputs = json.loads(self.terraform("output", "-json"))
        return {name: output["value"] for name, output in outputs.items()}
