# One VPC in one zone: a public subnet (the router, the NAT gateway) and a private one (the replicas). One zone, because
# a replica that crosses zones pays for every token, and a region with one replica does not survive its zone anyway.

data "aws_ec2_instance_type_offerings" "wanted" {
  for_each      = toset(concat(var.network.instance_types, var.more_instance_types))
  location_type = "availability-zone"

  filter {
    name   = "instance-type"
    values = [each.value]
  }
}

locals {
  offered = [for one in data.aws_ec2_instance_type_offerings.wanted : toset(one.locations)]
  zones   = try(sort(tolist(setintersection(local.offered...))), [])
  zone    = var.zone != null ? var.zone : try(local.zones[0], null)
}

resource "aws_vpc" "this" {
  # checkov:skip=CKV2_AWS_11: Flow logs would be kept, and paid for, beyond a measurement; security groups name every way in and out.
  cidr_block           = var.network.cidr
  enable_dns_support   = true
  enable_dns_hostnames = true
  tags                 = { Name = var.name }

  lifecycle {
    precondition {
      condition     = local.zone != null
      error_message = "No zone of this region offers ${join(" and ", concat(var.network.instance_types, var.more_instance_types))}; name another region in places.yaml."
    }
  }
}

# Nothing may use it: an instance without a security group of its own must reach nothing.
resource "aws_default_security_group" "this" {
  vpc_id = aws_vpc.this.id
  tags   = { Name = "${var.name}-default" }
}

resource "aws_internet_gateway" "this" {
  vpc_id = aws_vpc.this.id
  tags   = { Name = var.name }
}

resource "aws_subnet" "public" {
  vpc_id                  = aws_vpc.this.id
  cidr_block              = var.network.public_cidr
  availability_zone       = local.zone
  map_public_ip_on_launch = false
  tags                    = { Name = "${var.name}-public" }

  lifecycle {
    ignore_changes = [availability_zone] # a new offering must not move what runs
  }
}

resource "aws_route_table" "public" {
  vpc_id = aws_vpc.this.id
  tags   = { Name = "${var.name}-public" }
}

resource "aws_route" "internet" {
  route_table_id         = aws_route_table.public.id
  destination_cidr_block = "0.0.0.0/0"
  gateway_id             = aws_internet_gateway.this.id
}

resource "aws_route_table_association" "public" {
  subnet_id      = aws_subnet.public.id
  route_table_id = aws_route_table.public.id
}

# Replicas fetch image and model through NAT: nobody can begin a connection to them from outside.
resource "aws_subnet" "private" {
  count             = var.network.has_replicas ? 1 : 0
  vpc_id            = aws_vpc.this.id
  cidr_block        = var.network.private_cidr
  availability_zone = local.zone
  tags              = { Name = "${var.name}-private" }

  lifecycle {
    ignore_changes = [availability_zone]
  }
}

resource "aws_eip" "nat" {
  count  = var.network.has_replicas ? 1 : 0
  domain = "vpc"
  tags   = { Name = "${var.name}-nat" }
}

resource "aws_nat_gateway" "this" {
  count         = var.network.has_replicas ? 1 : 0
  allocation_id = aws_eip.nat[0].id
  subnet_id     = aws_subnet.public.id
  tags          = { Name = var.name }
  depends_on    = [aws_internet_gateway.this]
}

resource "aws_route_table" "private" {
  count  = var.network.has_replicas ? 1 : 0
  vpc_id = aws_vpc.this.id
  tags   = { Name = "${var.name}-private" }
}

resource "aws_route" "nat" {
  count                  = var.network.has_replicas ? 1 : 0
  route_table_id         = aws_route_table.private[0].id
  destination_cidr_block = "0.0.0.0/0"
  nat_gateway_id         = aws_nat_gateway.this[0].id
}

resource "aws_route_table_association" "private" {
  count          = var.network.has_replicas ? 1 : 0
  subnet_id      = aws_subnet.private[0].id
  route_table_id = aws_route_table.private[0].id
}
