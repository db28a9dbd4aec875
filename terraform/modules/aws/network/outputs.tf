output "vpc_id" {
  description = "The VPC."
  value       = aws_vpc.this.id
}

output "cidr" {
  description = "Its address range."
  value       = var.network.cidr
}

output "public_subnet_id" {
  description = "Where the router goes."
  value       = aws_subnet.public.id
  depends_on  = [aws_route.internet, aws_route_table_association.public] # what is put there boots with a way out
}

output "private_subnet_id" {
  description = "Where replicas go; null in a region without."
  value       = one(aws_subnet.private[*].id)
  depends_on  = [aws_route.nat, aws_route_table_association.private]
}

output "public_route_table_id" {
  description = "Routes of the public subnet."
  value       = aws_route_table.public.id
}

output "private_route_table_id" {
  description = "Routes of the private subnet; null in a region without replicas."
  value       = one(aws_route_table.private[*].id)
}
