# From regions.yaml to instances: which type, how many, which replica on which GPUs, at which address.

locals {
  document     = yamldecode(file(var.regions_file))
  region_names = [for region in local.document.regions : region.name]

  # "2xL40S": two GPUs, so tensor parallel 2. What does not read like that is refused by name in checks.tf.
  wanted = [for replica in local.document.replicas : {
    name            = replica.name
    region          = replica.region
    accelerator     = try(replica.accelerator, "")
    tensor_parallel = try(tonumber(regex("^([1248])x[A-Za-z0-9]+$", replica.accelerator)[0]), 0)
    gpu             = try(regex("^[1248]x([A-Za-z0-9]+)$", replica.accelerator)[0], "")
    running         = try(tonumber(replica.capacity.max_running_requests), 64)
  }]
  unsized = [for replica in local.wanted : replica.name if !anytrue([
    for one in try(var.instance_catalog[replica.gpu], []) : one.gpus >= replica.tensor_parallel && replica.tensor_parallel > 0
  ])]
  sized = [for replica in local.wanted : merge(replica, {
    instance = [for one in var.instance_catalog[replica.gpu] : one if one.gpus >= replica.tensor_parallel][0]
  }) if !contains(local.unsized, replica.name) && contains(keys(local.networks), replica.region)]

  # Replicas that can share instances, in the order of the file: one more at its end moves nobody else.
  group_of = { for replica in local.sized : "${replica.region}/${replica.accelerator}" => replica... }
  groups   = distinct([for replica in local.sized : "${replica.region}/${replica.accelerator}"])
  packed = flatten([for group in local.groups : [
    for number, members in chunklist(local.group_of[group], var.share_instances ? floor(local.group_of[group][0].instance.gpus / local.group_of[group][0].tensor_parallel) : 1) : {
      key     = lower(replace("${group}-${number}", "/", "-"))
      region  = members[0].region
      type    = members[0].instance.type
      gpus    = members[0].instance.gpus
      members = members
      # A group has 256 addresses of its own, so that it can grow without moving the next one.
      host = 10 + number + 256 * index([for other in local.groups : other if split("/", other)[0] == members[0].region], group)
    }
  ]])

  engines = { for engine in flatten([for instance in local.packed : [
    for slot, member in instance.members : {
      name            = member.name
      region          = member.region
      instance        = instance.key
      address         = cidrhost(local.networks[member.region].private_cidr, instance.host)
      port            = local.first_engine_port + slot
      tensor_parallel = member.tensor_parallel
      gpus            = join(",", [for gpu in range(slot * member.tensor_parallel, (slot + 1) * member.tensor_parallel) : tostring(gpu)])
      running         = member.running
    }
  ]]) : engine.name => engine }

  instances = { for instance in local.packed : instance.key => {
    region     = instance.region
    type       = instance.type
    gpus       = instance.gpus
    gpus_used  = sum([for member in instance.members : member.tensor_parallel])
    address    = cidrhost(local.networks[instance.region].private_cidr, instance.host)
    name       = "${var.name}-${instance.key}"
    user_data  = local.engine_user_data[instance.key]
    engines    = [for member in instance.members : member.name]
    first_port = local.first_engine_port
    last_port  = local.first_engine_port + length(instance.members) - 1
  } }
}
