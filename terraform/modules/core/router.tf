# What the router's machine is told at its first boot, and the configuration that it fetches from then on.

locals {
  proxy_bind = "127.0.0.1:8080" # TLS ends before it, on the same machine
  admin_bind = "127.0.0.1:9090" # reached by a session of the cloud's own, never over the network
  tuner_bind = "127.0.0.1:9091"
  key_name   = "GORGO_ENGINE_KEY"

  store_password_name = "GORGO_STORE_PASSWORD"
  group_key_name      = "GORGO_GROUP_KEY"
  # Where systemd puts the files that LoadCredential names, for nginx alone.
  credentials = "/run/credentials/gorgo-tls.service"

  # regions.yaml with the addresses in it: what people wrote stays, where things are is filled in.
  regions_generated = join("\n", ["# Made by terraform from ${basename(var.regions_file)}: edit that file, and apply.", yamlencode(merge(local.document, {
    proxy = merge(local.document.proxy, { bind = local.proxy_bind, admin_bind = local.admin_bind })
    replicas = [for replica in local.document.replicas : merge(replica, {
      url         = "http://${local.engines[replica.name].address}:${local.engines[replica.name].port}"
      models      = [var.model.served_name]
      api_key_env = local.key_name
      capacity    = merge(try(replica.capacity, {}), { max_running_requests = local.engines[replica.name].running })
    }) if contains(keys(local.engines), replica.name)]
    }, var.store.enabled ? {
    shared = {
      url          = "rediss://${var.store.address}:6379/0"
      group        = var.name
      password_env = local.store_password_name
      key_env      = local.group_key_name
    }
  } : {}))])

  max_body_bytes = try(local.document.limits.max_body_bytes, 33554432)
  max_in_flight  = try(local.document.limits.max_in_flight, 4096)
  grace_s        = try(local.document.limits.shutdown_grace_s, 30)
  # The proxy gives up first, with an error of its own that says why.
  patience_s = ceil(max(try(local.document.limits.first_token_timeout_s, 120) * try(local.document.limits.max_attempts, 3), try(local.document.limits.response_timeout_s, 600)) + 30)

  metrics_guard = join("", concat([for cidr in var.metrics_cidrs : "allow ${cidr}; "], ["deny all;"]))
  nginx = templatefile("${path.module}/templates/nginx.conf.tftpl", {
    server_name    = var.server_name
    proxy          = local.proxy_bind
    credentials    = local.credentials
    max_body_bytes = local.max_body_bytes
    patience_s     = local.patience_s
    connections    = 4 * local.max_in_flight
  })
  nginx_metrics = join("\n", concat(
    [
      "# Made by terraform: metrics, and who may read them.",
      "location = /metrics { ${local.metrics_guard} proxy_pass http://proxy; }",
      "location = /metrics/tuner { ${local.metrics_guard} proxy_pass http://${local.tuner_bind}/metrics; }",
    ],
    [for name, engine in local.engines : "location = /metrics/replicas/${name} { ${local.metrics_guard} proxy_pass http://${engine.address}:${engine.port}/metrics; }"],
    [""],
  ))

  router_units = merge(
    {
      "gorgo-secrets.service"       = local.secrets_unit
      "gorgo-install.service"       = file("${path.module}/templates/gorgo-install.service")
      "gorgo-configuration.service" = file("${path.module}/templates/gorgo-configuration.service")
      "gorgo-configuration.timer"   = file("${path.module}/templates/gorgo-configuration.timer")
      "gorgo-tls.service"           = templatefile("${path.module}/templates/gorgo-tls.service.tftpl", { files = 8 * local.max_in_flight + 1024 })
      "gorgo.service"               = templatefile("${path.module}/templates/gorgo.service.tftpl", { grace_s = ceil(local.grace_s) + 10, files = 2 * local.max_in_flight + 1024 })
    },
    var.tuner.enabled ? {
      "gorgo-history.service" = file("${path.module}/templates/gorgo-history.service")
      "gorgo-tuner.service"   = templatefile("${path.module}/templates/gorgo-tuner.service.tftpl", { admin = local.admin_bind, metrics = local.tuner_bind, algorithm = var.tuner.algorithm, mode = var.tuner.mode })
    } : {},
  )
  router_scripts = merge({
    "gorgo-secrets" = templatefile("${path.module}/templates/router-secrets.sh.tftpl", {
      fetch = local.fetch_secret, prefix = var.secrets.prefix, key_name = local.key_name
      store = var.store.enabled, password_name = local.store_password_name, group_key_name = local.group_key_name
    })
    "gorgo-install"       = templatefile("${path.module}/templates/gorgo-install.sh.tftpl", { artefacts = var.artefacts, wheel = var.package.wheel, sha256 = var.package.sha256, lock_sha256 = var.package.lock_sha256, extras = var.store.enabled ? "[shared]" : "" })
    "gorgo-configuration" = templatefile("${path.module}/templates/gorgo-configuration.sh.tftpl", { artefacts = var.artefacts })
    }, var.tuner.enabled ? {
    "gorgo-history" = file("${path.module}/templates/gorgo-history.sh")
  } : {})

  router_user_data = join("\n", ["#cloud-config", yamlencode({
    users = ["default", { name = "gorgo", system = true, shell = "/usr/sbin/nologin" }]
    write_files = concat(
      [
        { path = "/etc/sysctl.d/90-gorgo.conf", permissions = "0644", content = local.network_sysctl },
        { path = "/etc/gorgo/nginx.conf", permissions = "0644", content = local.nginx },
      ],
      [for name, text in local.router_scripts : { path = "/usr/local/sbin/${name}", permissions = "0755", content = text }],
      [for name, text in local.router_units : { path = "/etc/systemd/system/${name}", permissions = "0644", content = text }],
    )
    runcmd = [
      ["sysctl", "--system"],
      ["systemctl", "daemon-reload"],
      concat(["systemctl", "enable", "--now", "--no-block"], sort(keys(local.router_units))),
    ]
  })])
}
