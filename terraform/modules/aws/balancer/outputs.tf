output "public_address" {
  description = "Public IPv4 address; it stays when routers are replaced."
  value       = aws_eip.this.public_ip
}

output "security_group_id" {
  description = "The balancer's security group."
  value       = aws_security_group.this.id
}

output "target_group_arn" {
  description = "The group of routers that clients reach."
  value       = aws_lb_target_group.routers.arn
}
