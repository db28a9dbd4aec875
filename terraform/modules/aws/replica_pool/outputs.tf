output "instance_ids" {
  description = "Instances by key."
  value       = { for key, instance in aws_instance.this : key => instance.id }
}
