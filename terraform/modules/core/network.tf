# Addresses are computed, not found: the router's configuration is then known before anything is made, and a replica
# that was replaced comes back where it was.

locals {
  first_engine_port = 30000
  router_region     = local.document.proxy.region
  inhabited         = distinct(concat([local.router_region], [for replica in local.document.replicas : replica.region]))

  networks = { for number, region in local.region_names : region => {
    place        = lookup(var.places, region, "")
    cidr         = cidrsubnet(var.base_cidr, 4, number)
    public_cidr  = cidrsubnet(cidrsubnet(var.base_cidr, 4, number), 8, 0)
    private_cidr = cidrsubnet(cidrsubnet(var.base_cidr, 4, number), 4, 1)
    has_router   = region == local.router_region
    has_replicas = contains([for replica in local.document.replicas : replica.region], region)
  } if contains(local.inhabited, region) && number < 16 }

  # What the network of a region has to offer and let through, once the instances are known.
  demands = { for region, network in local.networks : region => {
    instance_types = distinct([for instance in local.packed : instance.type if instance.region == region])
    first_port     = local.first_engine_port
    last_port = max(local.first_engine_port, [
      for instance in local.packed : local.first_engine_port + length(instance.members) - 1 if instance.region == region
    ]...)
  } }

  # A second router has the next address, a name of its own, and the same files.
  machines = { for number in range(var.routers) :
    number == 0 ? "${var.name}-router" : "${var.name}-router-${number + 1}"
    => try(cidrhost(local.networks[local.router_region].public_cidr, 10 + number), "")
  }
  # The balancer's, one per router: 443 leads to either.
  metrics_ports = { for number, name in sort(keys(local.machines)) : name => var.routers == 1 ? 443 : 8441 + number }
}
