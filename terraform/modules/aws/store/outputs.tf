output "address" {
  description = "DNS name of the store; its certificate is of a public authority."
  value       = aws_elasticache_replication_group.this.primary_endpoint_address
}
