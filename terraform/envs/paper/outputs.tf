output "public_address" {
  description = "The public IPv4 address of the router, or of the balancer before two: what the DNS name must point at."
  value       = one(local.balanced ? module.balancer[*].public_address : values(module.router.public_addresses))
}

output "base_url" {
  description = "What clients use."
  value       = "https://${var.server_name}/v1"
}

output "router_instance_id" {
  description = "The first router's machine, for `aws ssm start-session`."
  value       = module.router.instance_ids["${var.name}-router"]
}

output "router_instance_ids" {
  description = "The routers' machines by name."
  value       = module.router.instance_ids
}

output "regions_generated" {
  description = "regions.yaml with the replicas' addresses, as the proxy reads it."
  value       = module.core.regions_generated

  precondition {
    condition = jsonencode(local.generated_for) == jsonencode({
      router   = module.core.router.region
      replicas = sort([for region, network in module.core.networks : region if network.has_replicas])
    })
    error_message = "fleet.generated.tf is for another regions.yaml: run `python terraform/generate.py`."
  }
}

output "store_address" {
  description = "DNS name of the store of the routers, reached by them alone; null without one."
  value       = one(module.store[*].address)
}

output "secret_names" {
  description = "Parameters that must be there before apply, and the region that they must be in."
  value       = module.core.secret_names
}

output "files" {
  description = "What apply wrote on this machine."
  value       = module.files.paths
}

output "router_target_group_arn" {
  description = "The balancer's group of routers, for roll.py; null with one router."
  value       = one(module.balancer[*].target_group_arn)
}

output "router_has_history" {
  description = "Whether each router has a volume of its tuner's history, for roll.py."
  value       = module.core.router.has_history
}
