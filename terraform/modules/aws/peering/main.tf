# A private link between the router's VPC and one of replicas. AWS encrypts what crosses between regions on its own
# network; replicas of different regions have no way to each other.

resource "aws_vpc_peering_connection" "this" {
  provider    = aws.router
  vpc_id      = var.router.vpc_id
  peer_vpc_id = var.replicas.vpc_id
  peer_region = var.replicas_place
  auto_accept = false
  tags        = { Name = var.name }
}

resource "aws_vpc_peering_connection_accepter" "this" {
  provider                  = aws.replicas
  vpc_peering_connection_id = aws_vpc_peering_connection.this.id
  auto_accept               = true
  tags                      = { Name = var.name }
}

resource "aws_route" "to_replicas" {
  provider                  = aws.router
  route_table_id            = var.router.public_route_table_id
  destination_cidr_block    = var.replicas.cidr
  vpc_peering_connection_id = aws_vpc_peering_connection_accepter.this.vpc_peering_connection_id
}

resource "aws_route" "to_router" {
  provider                  = aws.replicas
  route_table_id            = var.replicas.private_route_table_id
  destination_cidr_block    = var.router.cidr
  vpc_peering_connection_id = aws_vpc_peering_connection_accepter.this.vpc_peering_connection_id
}
