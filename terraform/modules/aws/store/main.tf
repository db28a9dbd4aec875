# The store in which the routers report to each other: one node of Valkey beside them. What it has may be lost at any time.

# Terraform has to give it to the service, so this one value is in the state.
data "aws_ssm_parameter" "password" {
  name            = var.password_parameter
  with_decryption = true
}

resource "aws_security_group" "this" {
  name        = "${var.name}-store"
  description = "Store: in from the routers alone"
  vpc_id      = var.vpc_id
  tags        = { Name = "${var.name}-store" }
}

resource "aws_vpc_security_group_ingress_rule" "routers" {
  security_group_id            = aws_security_group.this.id
  description                  = "The routers"
  referenced_security_group_id = var.router_security_group_id
  ip_protocol                  = "tcp"
  from_port                    = local.port
  to_port                      = local.port
}

resource "aws_vpc_security_group_egress_rule" "routers" {
  security_group_id            = var.router_security_group_id
  description                  = "The store"
  referenced_security_group_id = aws_security_group.this.id
  ip_protocol                  = "tcp"
  from_port                    = local.port
  to_port                      = local.port
}

resource "aws_elasticache_subnet_group" "this" {
  name       = "${var.name}-store"
  subnet_ids = [var.subnet_id] # nodes have no public address, whatever the subnet
}

resource "aws_elasticache_replication_group" "this" {
  # checkov:skip=CKV_AWS_191: Hashes and counts, which are lost with the node; the service's own key encrypts them.
  # checkov:skip=CKV2_AWS_50: All routers are in one zone, and go on alone without the store.
  replication_group_id       = "${var.name}-store"
  description                = "Reports between the routers of ${var.name}"
  engine                     = "valkey"
  engine_version             = "8.0"
  parameter_group_name       = "default.valkey8"
  node_type                  = var.node_type
  num_cache_clusters         = 1
  automatic_failover_enabled = false
  port                       = local.port
  subnet_group_name          = aws_elasticache_subnet_group.this.name
  security_group_ids         = [aws_security_group.this.id]
  transit_encryption_enabled = true
  transit_encryption_mode    = "required"
  at_rest_encryption_enabled = true
  auth_token                 = data.aws_ssm_parameter.password.value
  auth_token_update_strategy = "SET"
  snapshot_retention_limit   = 0
  auto_minor_version_upgrade = true
  apply_immediately          = true
}

locals {
  port = 6379
}
