output "instance_ids" {
  description = "Instances that are in no group, by key."
  value       = { for key, instance in aws_instance.this : key => instance.id }
}

output "groups" {
  description = "Names of the groups of spot instances by key."
  value       = { for key, group in aws_autoscaling_group.this : key => group.name }
}
