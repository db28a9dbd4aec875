# What an instance with GPUs is told at its first boot: where its key is, and one systemd unit per replica.

locals {
  secrets_place = coalesce(var.secrets.place, try(local.networks[local.router_region].place, ""), "none")

  engine_arguments = { for name, engine in local.engines : name => concat(
    ["--model-path", var.model.repository],
    var.model.revision == null ? [] : ["--revision", var.model.revision],
    [
      "--served-model-name", var.model.served_name, "--context-length", tostring(var.model.context_length),
      "--tp-size", tostring(engine.tensor_parallel), "--host", "0.0.0.0", "--port", tostring(engine.port),
      "--max-running-requests", tostring(engine.running), "--enable-metrics", "--enable-cache-report",
    ],
    var.engine_arguments,
  ) }

  engine_units = { for name, engine in local.engines : "gorgo-engine-${name}.service" => {
    instance = engine.instance
    text = templatefile("${path.module}/templates/gorgo-engine.service.tftpl", {
      replica = name, gpus = engine.gpus, image = var.engine_image, address = var.grouped ? "" : "${engine.address}:", port = engine.port, arguments = join(" ", local.engine_arguments[name])
    })
  } }

  engine_secrets = templatefile("${path.module}/templates/engine-secrets.sh.tftpl", {
    fetch = local.fetch_secret, prefix = var.secrets.prefix
  })
  fetch_secret   = templatefile("${path.module}/templates/fetch-secret.sh.tftpl", { place = local.secrets_place })
  secrets_unit   = file("${path.module}/templates/gorgo-secrets.service")
  network_sysctl = file("${path.module}/templates/90-gorgo.conf")

  # The address by which a machine of a group is known, which is not the one that it boots with.
  address_files = { for instance in local.packed : instance.key => var.grouped ? [
    { path = "/usr/local/sbin/gorgo-address", permissions = "0755", content = file("${path.module}/templates/gorgo-address.sh") },
    {
      path = "/etc/systemd/system/gorgo-address.service", permissions = "0644"
      content = templatefile("${path.module}/templates/gorgo-address.service.tftpl", {
        address = [for engine in local.engines : engine.address if engine.instance == instance.key][0]
        ports   = join(" ", [for engine in local.engines : engine.port if engine.instance == instance.key])
      })
    },
  ] : [] }

  engine_user_data = { for instance in local.packed : instance.key => join("\n", ["#cloud-config", yamlencode({
    write_files = concat(
      [
        { path = "/etc/sysctl.d/90-gorgo.conf", permissions = "0644", content = local.network_sysctl },
        { path = "/usr/local/sbin/gorgo-secrets", permissions = "0755", content = local.engine_secrets },
        { path = "/etc/systemd/system/gorgo-secrets.service", permissions = "0644", content = local.secrets_unit },
      ],
      [for unit, one in local.engine_units : { path = "/etc/systemd/system/${unit}", permissions = "0644", content = one.text } if one.instance == instance.key],
      local.address_files[instance.key],
    )
    runcmd = concat(
      [["sysctl", "--system"], ["systemctl", "daemon-reload"]],
      [concat(["systemctl", "enable", "--now", "--no-block", "gorgo-secrets.service"], [for unit, one in local.engine_units : unit if one.instance == instance.key], var.grouped ? ["gorgo-address.service"] : [])],
    )
  })]) }
}
