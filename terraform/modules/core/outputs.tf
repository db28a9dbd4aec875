output "networks" {
  description = "Per region with a router or replicas: place, address ranges, what is there, instance types and engine ports."
  value       = { for region, network in local.networks : region => merge(network, local.demands[region]) }

  precondition {
    condition     = length(local.region_names) <= 16
    error_message = "regions: at most 16, one /16 of base_cidr each."
  }
  precondition {
    condition     = length(setsubtract(local.inhabited, local.region_names)) == 0
    error_message = "regions: proxy.region or a replica's region is not in the list: ${join(", ", setsubtract(local.inhabited, local.region_names))}."
  }
  precondition {
    condition     = length(setsubtract(local.inhabited, keys(var.places))) == 0
    error_message = "places: no place for ${join(", ", setsubtract(local.inhabited, keys(var.places)))}."
  }
}

output "instances" {
  description = "Instances with GPUs by key: region, type, GPUs, address, name, first-boot text, replicas, ports."
  value       = local.instances

  precondition {
    condition     = length(local.unsized) == 0
    error_message = "replicas: ${join(", ", local.unsized)}: accelerator: expected 1x, 2x, 4x or 8x and one of ${join(", ", keys(var.instance_catalog))}, such as 2xL40S, and no more GPUs than an instance has."
  }
  precondition {
    condition     = alltrue([for replica in local.document.replicas : try(replica.engine, "sglang") == "sglang"])
    error_message = "replicas: engine: this module starts sglang only."
  }
  precondition {
    condition     = length(distinct(local.document.replicas[*].name)) == length(local.document.replicas)
    error_message = "replicas: two have the same name."
  }
  precondition {
    condition     = alltrue([for text in values(local.engine_user_data) : length(text) <= 16384])
    error_message = "The first-boot text of an instance is over the 16 KiB that the cloud takes."
  }
}

output "engines" {
  description = "Replicas by name: instance, address, port, GPUs, tensor parallelism."
  value       = local.engines
}

output "engine_units" {
  description = "Text of the engines' systemd units by name."
  value       = { for name, unit in local.engine_units : name => unit.text }
}

output "router" {
  description = "The router: region, place, private addresses by machine, ports for scrapes, drain time, first-boot text."
  value = {
    region        = local.router_region
    place         = try(local.networks[local.router_region].place, "")
    machines      = local.machines
    metrics_ports = local.metrics_ports
    drain_s       = ceil(local.grace_s) + 30
    user_data     = local.router_user_data
    has_history   = var.tuner.enabled
  }

  precondition {
    condition     = length(local.router_user_data) <= 16384
    error_message = "The router's first-boot text is over the 16 KiB that the cloud takes."
  }
}

output "router_units" {
  description = "Text of the router's systemd units by name."
  value       = local.router_units
}

output "regions_generated" {
  description = "regions.yaml with the replicas' addresses: what the proxy reads."
  value       = local.regions_generated

  # They name files of another machine, and nginx does here what they are for.
  precondition {
    condition     = !can(local.document.proxy.tls.cert) && !can(local.document.clients.keys_file)
    error_message = "proxy.tls, clients.keys_file: leave them out: TLS ends before the proxy, and clients' keys are a parameter."
  }
  precondition {
    condition     = !anytrue([for replica in local.document.replicas : can(replica.ca_file) || can(replica.client_cert)])
    error_message = "replicas: ca_file, client_cert: leave them out: replicas are reached by private links, without TLS."
  }
}

output "configuration" {
  description = "Files that the router fetches and follows, by name."
  value       = { "regions.yaml" = local.regions_generated, "metrics.nginx.conf" = local.nginx_metrics }
}

output "secret_names" {
  description = "Names in the secret store that the engines and the router read; people put the values there."
  value = {
    place   = local.secrets_place
    engines = ["${var.secrets.prefix}/engine-key"]
    router = [
      for name in concat(
        ["engine-key", "admin-token", "client-keys", "tls-certificate", "tls-key"],
        var.store.enabled ? ["store-password", "group-key"] : [],
      ) : "${var.secrets.prefix}/${name}"
    ]
  }
}

output "peered" {
  description = "Regions whose network is linked to the router's."
  value       = [for region in keys(local.networks) : region if region != local.router_region]
}

output "scraped" {
  description = "What a Prometheus may scrape over TLS at the router: job, path, labels, and the ports, one per router where each has its own."
  value = concat(
    [{ job = "gorgo", path = "/metrics", labels = {}, ports = values(local.metrics_ports) }],
    var.tuner.enabled ? [{ job = "gorgo-tuner", path = "/metrics/tuner", labels = {}, ports = values(local.metrics_ports) }] : [],
    [for name, engine in local.engines : { job = "sglang-${name}", path = "/metrics/replicas/${name}", labels = { replica = name, region = engine.region }, ports = [443] }],
  )
}
