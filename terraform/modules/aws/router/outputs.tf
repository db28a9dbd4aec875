output "public_address" {
  description = "Public IPv4 address; it stays when the machine is replaced."
  value       = aws_eip.this.public_ip
}

output "instance_id" {
  description = "The machine, for `aws ssm start-session`."
  value       = aws_instance.this.id
}
