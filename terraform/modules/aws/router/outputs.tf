output "public_addresses" {
  description = "Public IPv4 addresses by machine; they stay when a machine is replaced."
  value       = { for name, address in aws_eip.this : name => address.public_ip }
}

output "instance_ids" {
  description = "The machines by name, for `aws ssm start-session`."
  value       = { for name, instance in aws_instance.this : name => instance.id }
}

output "security_group_id" {
  description = "The machines' security group."
  value       = aws_security_group.this.id
}
