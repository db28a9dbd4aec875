output "unit" {
  description = "The systemd unit of the router's machine that has the group follow the number; follow.sh is its program"
  value       = <<-EOT
    [Unit]
    Description=The group ${var.name} follows gorgo_replicas_wanted
    After=gorgo.service

    [Service]
    Environment=GROUP=${aws_autoscaling_group.this.name} REGION=${var.region} MODEL=${var.model} PORT=${var.port}
    EnvironmentFile=/etc/gorgo/environment
    ExecStart=/usr/local/bin/gorgo-follow
    Restart=always
    RestartSec=15
    DynamicUser=yes
  EOT
}
