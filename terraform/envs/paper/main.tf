# The paper's fleet: a proxy in Virginia, one replica on 2x L40S each in Virginia, Frankfurt and Seoul.
# What repeats by region is in fleet.generated.tf.

locals {
  places = yamldecode(file("${path.module}/places.yaml"))
  tags   = { project = "gorgo", environment = var.name }
  bucket = "${var.name}-${data.aws_caller_identity.router.account_id}"

  package_files = { (basename(var.wheel)) = var.wheel, "requirements.lock" = var.lock_file }

  secret_arn         = "arn:aws:ssm:${module.core.secret_names.place}:${data.aws_caller_identity.router.account_id}:parameter"
  engine_secret_arns = [for name in module.core.secret_names.engines : "${local.secret_arn}${name}"]
  balanced           = var.routers > 1
  router_secret_arns = [for name in module.core.secret_names.router : "${local.secret_arn}${name}"]
}

module "core" {
  source          = "../../modules/core"
  name            = var.name
  regions_file    = var.regions_file
  places          = local.places
  share_instances = var.share_instances
  grouped         = var.spot
  model           = var.model
  engine_image    = var.engine_image

  engine_image_by_tag = var.engine_image_by_tag
  engine_arguments    = var.engine_arguments
  secrets             = { prefix = var.secrets_prefix }
  server_name         = var.server_name
  metrics_cidrs       = var.metrics_cidrs
  tuner               = var.tuner
  routers             = var.routers
  store               = { enabled = var.store.enabled, address = one(module.store[*].address) }
  artefacts           = "s3://${local.bucket}"
  package = {
    wheel       = basename(var.wheel)
    sha256      = filesha256(var.wheel)
    lock_sha256 = filesha256(var.lock_file)
  }
}

module "observability" {
  source      = "../../modules/observability"
  server_name = var.server_name
  scraped     = module.core.scraped
}

module "files" {
  source = "../../modules/files"
  folder = var.output_folder
  texts  = merge({ "regions.generated.yaml" = module.core.regions_generated }, module.observability.files)
}
