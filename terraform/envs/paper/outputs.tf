output "public_address" {
  description = "The router's public IPv4 address: what the DNS name must point at."
  value       = module.router.public_address
}

output "base_url" {
  description = "What clients use."
  value       = "https://${var.server_name}/v1"
}

output "router_instance_id" {
  description = "The router's machine, for `aws ssm start-session`."
  value       = module.router.instance_id
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

output "secret_names" {
  description = "Parameters that must be there before apply, and the region that they must be in."
  value       = module.core.secret_names
}

output "files" {
  description = "What apply wrote on this machine."
  value       = module.files.paths
}
