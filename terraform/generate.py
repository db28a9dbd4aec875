"""Writes `fleet.generated.tf` of an environment: one provider alias, network, replica pool and link per region.

Terraform cannot loop over providers, so what differs by region alone is written out here, from `regions.yaml` (which
regions there are, where the proxy and the replicas are) and `places.yaml` (the cloud's name of each region). Everything
that is decided is decided in modules/core; this file only repeats blocks.

    python terraform/generate.py             # write
    python terraform/generate.py --check     # exit 1 if a file is not what would be written
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).parent
FILE = "fleet.generated.tf"
REGIONS = HERE.parent / "regions.yaml"

HEADER = """\
# Made by terraform/generate.py from regions.yaml and places.yaml: not to be edited.
"""

PROVIDER = """
provider "aws" {{
  alias  = "{alias}"
  region = "{place}"

  default_tags {{
    tags = local.tags
  }}
}}

module "network_{alias}" {{
  source    = "../../modules/aws/network"
  providers = {{ aws = aws.{alias} }}
  name      = "${{var.name}}-{region}"
  network   = module.core.networks["{region}"]
  zone      = lookup(var.zones, "{region}", null)
{more}}}
"""

MORE = """
  more_instance_types = [var.router_instance_type]
"""

REPLICAS = """
module "replicas_{alias}" {{
  source           = "../../modules/aws/replica_pool"
  providers        = {{ aws = aws.{alias} }}
  name             = "${{var.name}}-{region}"
  instances        = {{ for key, one in module.core.instances : key => one if one.region == "{region}" }}
  network          = module.core.networks["{region}"]
  vpc_id           = module.network_{alias}.vpc_id
  subnet_id        = module.network_{alias}.private_subnet_id
  router_addresses = values(module.core.router.machines)
  secrets          = {{ parameter_arns = local.engine_secret_arns, key_arn = var.secrets_key_arn }}
  spot             = var.spot
  image_parameter  = var.gpu_image_parameter
  volume_gib       = var.replica_volume_gib
}}
"""

PEERING = """
module "peering_{alias}" {{
  source         = "../../modules/aws/peering"
  providers      = {{ aws.router = aws.{router}, aws.replicas = aws.{alias} }}
  name           = "${{var.name}}-{region}"
  router         = module.network_{router}
  replicas       = module.network_{alias}
  replicas_place = "{place}"
}}
"""

ROUTER = """
data "aws_caller_identity" "router" {{
  provider = aws.{router}
}}

module "router" {{
  source          = "../../modules/aws/router"
  providers       = {{ aws = aws.{router} }}
  name            = var.name
  router          = module.core.router
  vpc_id          = module.network_{router}.vpc_id
  subnet_id       = module.network_{router}.public_subnet_id
  instance_type   = var.router_instance_type
  image_parameter = var.router_image_parameter
  client_cidrs    = var.client_cidrs
  metrics_cidrs   = var.metrics_cidrs
  replicas        = {{ for region, network in module.core.networks : region => network if network.has_replicas }}
  secrets         = {{ parameter_arns = local.router_secret_arns, key_arn = var.secrets_key_arn }}
  bucket          = local.bucket
  package_files   = local.package_files
  configuration   = module.core.configuration
  balancer        = local.balanced ? {{ security_group_id = one(module.balancer[*].security_group_id) }} : null
}}

module "balancer" {{
  count                    = local.balanced ? 1 : 0
  source                   = "../../modules/aws/balancer"
  providers                = {{ aws = aws.{router} }}
  name                     = var.name
  vpc_id                   = module.network_{router}.vpc_id
  subnet_id                = module.network_{router}.public_subnet_id
  instance_ids             = module.router.instance_ids
  metrics_ports            = module.core.router.metrics_ports
  router_security_group_id = module.router.security_group_id
  client_cidrs             = var.client_cidrs
  metrics_cidrs            = var.metrics_cidrs
  drain_s                  = module.core.router.drain_s
}}

module "store" {{
  count                    = var.store.enabled ? 1 : 0
  source                   = "../../modules/aws/store"
  providers                = {{ aws = aws.{router} }}
  name                     = var.name
  vpc_id                   = module.network_{router}.vpc_id
  subnet_id                = module.network_{router}.public_subnet_id
  router_security_group_id = module.router.security_group_id
  password_parameter       = "${{var.secrets_prefix}}/store-password"
  node_type                = var.store.node_type
}}
"""

OUTPUT = """
locals {{
  # regions.yaml as it was when this was written; outputs.tf refuses another one.
  generated_for = {{
    router   = "{router}"
    replicas = [{homes}]
  }}
}}

output "replica_instance_ids" {{
  description = "Instances with GPUs, for `aws ssm start-session`."
  value       = merge({pools})
}}
"""


class PlaceError(Exception):
    """A region that is used has no place, or cannot be named in terraform."""


def rendered(document: dict[str, Any], places: dict[str, str]) -> str:
    """The text of the file, from a regions.yaml that `gorgo check` accepts. Raises `PlaceError`, naming the region."""
    router = document["proxy"]["region"]
    homes = [replica["region"] for replica in document["replicas"]]
    regions = [region["name"] for region in document["regions"]]
    used = [region for region in regions if region == router or region in homes]
    aliases = _aliases([*used, *(home for home in (router, *homes) if home not in used)], places)
    parts = [HEADER]
    for region in used:
        words = {"region": region, "alias": aliases[region], "place": places[region], "router": aliases[router]}
        words["more"] = MORE if region == router else ""
        parts.append(PROVIDER.format(**words))
        if region in homes:
            parts.append(REPLICAS.format(**words))
        if region != router:
            parts.append(PEERING.format(**words))
    parts.append(ROUTER.format(router=aliases[router]))
    pools = (f"module.replicas_{aliases[region]}.instance_ids" for region in used if region in homes)
    parts.append(
        OUTPUT.format(
            router=router, homes=", ".join(f'"{home}"' for home in sorted(set(homes))), pools=", ".join(pools)
        )
    )
    return "".join(parts)


def _aliases(regions: list[str], places: dict[str, str]) -> dict[str, str]:
    """Names for terraform: letters, digits and `_`, a letter first, each once."""
    if unplaced := [region for region in regions if region not in places]:
        raise PlaceError(f"places.yaml: no place for {', '.join(unplaced)}")
    aliases = {region: re.sub(r"[^a-z0-9]", "_", region.lower()) for region in regions}
    if twins := [region for region in regions if list(aliases.values()).count(aliases[region]) > 1]:
        raise PlaceError(f"regions.yaml: {' and '.join(twins)} differ in signs that terraform's names do not have")
    return {region: alias if alias[0].isalpha() else f"r_{alias}" for region, alias in aliases.items()}


def written(environment: Path, regions: Path) -> str:
    """What the environment's file should hold."""
    places = yaml.safe_load((environment / "places.yaml").read_text(encoding="utf-8"))
    return rendered(yaml.safe_load(regions.read_text(encoding="utf-8")), places)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if something would be written")
    parser.add_argument("--environment", type=Path, default=HERE / "envs" / "paper", help="folder with places.yaml")
    parser.add_argument("--regions", type=Path, default=REGIONS, help="the fleet; as the environment's regions_file")
    options = parser.parse_args(arguments)
    path = options.environment / FILE
    try:
        text = written(options.environment, options.regions)
    except PlaceError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    if path.is_file() and path.read_text(encoding="utf-8") == text:
        return 0
    if options.check:
        sys.stderr.write(f"{path}: not what regions.yaml and places.yaml ask for; run terraform/generate.py\n")
        return 1
    path.write_text(text, encoding="utf-8")
    sys.stdout.write(f"{path}: written\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
