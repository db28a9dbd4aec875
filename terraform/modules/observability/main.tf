# What a Prometheus and a Grafana of the operator's own need. Everything is scraped over TLS at the router, which passes
# the replicas' metrics on, so that one open port and one allowed network are enough.

variable "server_name" {
  description = "DNS name of the router."
  type        = string
}

variable "scraped" {
  description = "The core module's output `scraped`: job, path, labels and ports."
  type        = list(object({ job = string, path = string, labels = map(string), ports = list(number) }))
}

variable "scrape_interval_s" {
  description = "Seconds between two scrapes."
  type        = number
  default     = 15
  validation {
    condition     = var.scrape_interval_s >= 1 && floor(var.scrape_interval_s) == var.scrape_interval_s
    error_message = "scrape_interval_s: expected whole seconds, at least 1."
  }
}

locals {
  prometheus = yamlencode({
    global     = { scrape_interval = "${var.scrape_interval_s}s" }
    rule_files = ["gorgo-rules.yml"]
    scrape_configs = [for one in var.scraped : {
      job_name       = one.job
      scheme         = "https"
      metrics_path   = one.path
      static_configs = [{ targets = [for port in one.ports : "${var.server_name}:${port}"], labels = one.labels }]
    }]
  })
}

output "files" {
  description = "Texts by file name: Prometheus' scrape configuration and alerts, and a dashboard to import into Grafana."
  value = {
    "prometheus.yml"       = local.prometheus
    "gorgo-rules.yml"      = file("${path.module}/gorgo-rules.yml")
    "gorgo-dashboard.json" = file("${path.module}/gorgo-dashboard.json")
  }
}
