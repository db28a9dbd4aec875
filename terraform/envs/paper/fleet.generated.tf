# Made by terraform/generate.py from regions.yaml and places.yaml: not to be edited.

provider "aws" {
  alias  = "us_ashburn"
  region = "us-east-1"

  default_tags {
    tags = local.tags
  }
}

module "network_us_ashburn" {
  source    = "../../modules/aws/network"
  providers = { aws = aws.us_ashburn }
  name      = "${var.name}-us-ashburn"
  network   = module.core.networks["us-ashburn"]
  zone      = lookup(var.zones, "us-ashburn", null)

  more_instance_types = [var.router_instance_type]
}

module "replicas_us_ashburn" {
  source           = "../../modules/aws/replica_pool"
  providers        = { aws = aws.us_ashburn }
  name             = "${var.name}-us-ashburn"
  instances        = { for key, one in module.core.instances : key => one if one.region == "us-ashburn" }
  network          = module.core.networks["us-ashburn"]
  vpc_id           = module.network_us_ashburn.vpc_id
  subnet_id        = module.network_us_ashburn.private_subnet_id
  router_addresses = values(module.core.router.machines)
  secrets          = { parameter_arns = local.engine_secret_arns, key_arn = var.secrets_key_arn }
  spot             = var.spot
  image_parameter  = var.gpu_image_parameter
  volume_gib       = var.replica_volume_gib
}

provider "aws" {
  alias  = "eu_frankfurt"
  region = "eu-central-1"

  default_tags {
    tags = local.tags
  }
}

module "network_eu_frankfurt" {
  source    = "../../modules/aws/network"
  providers = { aws = aws.eu_frankfurt }
  name      = "${var.name}-eu-frankfurt"
  network   = module.core.networks["eu-frankfurt"]
  zone      = lookup(var.zones, "eu-frankfurt", null)
}

module "replicas_eu_frankfurt" {
  source           = "../../modules/aws/replica_pool"
  providers        = { aws = aws.eu_frankfurt }
  name             = "${var.name}-eu-frankfurt"
  instances        = { for key, one in module.core.instances : key => one if one.region == "eu-frankfurt" }
  network          = module.core.networks["eu-frankfurt"]
  vpc_id           = module.network_eu_frankfurt.vpc_id
  subnet_id        = module.network_eu_frankfurt.private_subnet_id
  router_addresses = values(module.core.router.machines)
  secrets          = { parameter_arns = local.engine_secret_arns, key_arn = var.secrets_key_arn }
  spot             = var.spot
  image_parameter  = var.gpu_image_parameter
  volume_gib       = var.replica_volume_gib
}

module "peering_eu_frankfurt" {
  source         = "../../modules/aws/peering"
  providers      = { aws.router = aws.us_ashburn, aws.replicas = aws.eu_frankfurt }
  name           = "${var.name}-eu-frankfurt"
  router         = module.network_us_ashburn
  replicas       = module.network_eu_frankfurt
  replicas_place = "eu-central-1"
}

provider "aws" {
  alias  = "ap_seoul"
  region = "ap-northeast-2"

  default_tags {
    tags = local.tags
  }
}

module "network_ap_seoul" {
  source    = "../../modules/aws/network"
  providers = { aws = aws.ap_seoul }
  name      = "${var.name}-ap-seoul"
  network   = module.core.networks["ap-seoul"]
  zone      = lookup(var.zones, "ap-seoul", null)
}

module "replicas_ap_seoul" {
  source           = "../../modules/aws/replica_pool"
  providers        = { aws = aws.ap_seoul }
  name             = "${var.name}-ap-seoul"
  instances        = { for key, one in module.core.instances : key => one if one.region == "ap-seoul" }
  network          = module.core.networks["ap-seoul"]
  vpc_id           = module.network_ap_seoul.vpc_id
  subnet_id        = module.network_ap_seoul.private_subnet_id
  router_addresses = values(module.core.router.machines)
  secrets          = { parameter_arns = local.engine_secret_arns, key_arn = var.secrets_key_arn }
  spot             = var.spot
  image_parameter  = var.gpu_image_parameter
  volume_gib       = var.replica_volume_gib
}

module "peering_ap_seoul" {
  source         = "../../modules/aws/peering"
  providers      = { aws.router = aws.us_ashburn, aws.replicas = aws.ap_seoul }
  name           = "${var.name}-ap-seoul"
  router         = module.network_us_ashburn
  replicas       = module.network_ap_seoul
  replicas_place = "ap-northeast-2"
}

data "aws_caller_identity" "router" {
  provider = aws.us_ashburn
}

module "router" {
  source          = "../../modules/aws/router"
  providers       = { aws = aws.us_ashburn }
  name            = var.name
  router          = module.core.router
  vpc_id          = module.network_us_ashburn.vpc_id
  subnet_id       = module.network_us_ashburn.public_subnet_id
  instance_type   = var.router_instance_type
  image_parameter = var.router_image_parameter
  client_cidrs    = var.client_cidrs
  metrics_cidrs   = var.metrics_cidrs
  replicas        = { for region, network in module.core.networks : region => network if network.has_replicas }
  secrets         = { parameter_arns = local.router_secret_arns, key_arn = var.secrets_key_arn }
  bucket          = local.bucket
  package_files   = local.package_files
  configuration   = module.core.configuration
  balancer        = local.balanced ? { security_group_id = one(module.balancer[*].security_group_id) } : null
}

module "balancer" {
  count                    = local.balanced ? 1 : 0
  source                   = "../../modules/aws/balancer"
  providers                = { aws = aws.us_ashburn }
  name                     = var.name
  vpc_id                   = module.network_us_ashburn.vpc_id
  subnet_id                = module.network_us_ashburn.public_subnet_id
  instance_ids             = module.router.instance_ids
  metrics_ports            = module.core.router.metrics_ports
  router_security_group_id = module.router.security_group_id
  client_cidrs             = var.client_cidrs
  metrics_cidrs            = var.metrics_cidrs
  drain_s                  = module.core.router.drain_s
}

module "store" {
  count                    = var.store.enabled ? 1 : 0
  source                   = "../../modules/aws/store"
  providers                = { aws = aws.us_ashburn }
  name                     = var.name
  vpc_id                   = module.network_us_ashburn.vpc_id
  subnet_id                = module.network_us_ashburn.public_subnet_id
  router_security_group_id = module.router.security_group_id
  password_parameter       = "${var.secrets_prefix}/store-password"
  node_type                = var.store.node_type
}

locals {
  # regions.yaml as it was when this was written; outputs.tf refuses another one.
  generated_for = {
    router   = "us-ashburn"
    replicas = ["ap-seoul", "eu-frankfurt", "us-ashburn"]
  }
}

output "replica_instance_ids" {
  description = "Instances with GPUs, for `aws ssm start-session`."
  value       = merge(module.replicas_us_ashburn.instance_ids, module.replicas_eu_frankfurt.instance_ids, module.replicas_ap_seoul.instance_ids)
}
