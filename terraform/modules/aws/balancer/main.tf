# One address before several routers. TCP goes through as it is: TLS ends on each router, which sees the client's address.

resource "aws_security_group" "this" {
  name        = "${var.name}-balancer"
  description = "Balancer: in by TLS, out to the routers"
  vpc_id      = var.vpc_id
  tags        = { Name = "${var.name}-balancer" }
}

resource "aws_vpc_security_group_ingress_rule" "tls" {
  for_each          = toset(concat(var.client_cidrs, var.metrics_cidrs))
  security_group_id = aws_security_group.this.id
  description       = "Clients and those that scrape"
  cidr_ipv4         = each.value
  ip_protocol       = "tcp"
  from_port         = 443
  to_port           = 443
}

# A port per router: a scrape of the common one would reach either.
resource "aws_vpc_security_group_ingress_rule" "metrics" {
  for_each          = { for pair in setproduct(var.metrics_cidrs, values(var.metrics_ports)) : "${pair[0]} ${pair[1]}" => pair }
  security_group_id = aws_security_group.this.id
  description       = "Those that scrape"
  cidr_ipv4         = each.value[0]
  ip_protocol       = "tcp"
  from_port         = each.value[1]
  to_port           = each.value[1]
}

resource "aws_vpc_security_group_egress_rule" "routers" {
  security_group_id            = aws_security_group.this.id
  description                  = "The routers"
  referenced_security_group_id = var.router_security_group_id
  ip_protocol                  = "tcp"
  from_port                    = 443
  to_port                      = 443
}

resource "aws_eip" "this" {
  # checkov:skip=CKV2_AWS_19: The balancer has it; the scanner knows addresses of instances alone.
  domain = "vpc"
  tags   = { Name = "${var.name}-balancer" }
}

resource "aws_lb" "this" {
  # checkov:skip=CKV_AWS_91: A log of connections would outlive it; each router has a line per request.
  # checkov:skip=CKV_AWS_150: Destroy must leave nothing.
  # checkov:skip=CKV_AWS_152: All routers are in one zone.
  name               = "${var.name}-routers"
  load_balancer_type = "network"
  security_groups    = [aws_security_group.this.id]

  subnet_mapping {
    subnet_id     = var.subnet_id
    allocation_id = aws_eip.this.id
  }
}

resource "aws_lb_target_group" "routers" {
  # checkov:skip=CKV_AWS_378: TLS ends on the routers; this only passes it on.
  name               = "${var.name}-routers"
  vpc_id             = var.vpc_id
  protocol           = "TCP"
  port               = 443
  target_type        = "instance"
  preserve_client_ip = true
  # Streams that are open may end: limits.shutdown_grace_s of the proxy and some more.
  deregistration_delay = var.drain_s

  # A router whose proxy stops, or that has no replica, gets no new connections.
  health_check {
    protocol            = "HTTPS"
    path                = "/ready"
    matcher             = "200"
    interval            = 5
    timeout             = 4
    healthy_threshold   = 2
    unhealthy_threshold = 2
  }
}

resource "aws_lb_target_group" "metrics" {
  # checkov:skip=CKV_AWS_378: TLS ends on the routers; this only passes it on.
  for_each           = var.metrics_ports
  name               = "${var.name}-metrics-${each.value}"
  vpc_id             = var.vpc_id
  protocol           = "TCP"
  port               = 443
  target_type        = "instance"
  preserve_client_ip = true

  # Metrics matter most where nothing is ready.
  health_check {
    protocol = "HTTPS"
    path     = "/health"
    matcher  = "200"
  }
}

resource "aws_lb_target_group_attachment" "routers" {
  for_each         = var.metrics_ports
  target_group_arn = aws_lb_target_group.routers.arn
  target_id        = var.instance_ids[each.key]
  port             = 443
}

resource "aws_lb_target_group_attachment" "metrics" {
  for_each         = var.metrics_ports
  target_group_arn = aws_lb_target_group.metrics[each.key].arn
  target_id        = var.instance_ids[each.key]
  port             = 443
}

resource "aws_lb_listener" "routers" {
  # checkov:skip=CKV_AWS_2: TCP goes through as it is, TLS within.
  # checkov:skip=CKV_AWS_103: The routers choose the versions of TLS.
  load_balancer_arn = aws_lb.this.arn
  protocol          = "TCP"
  port              = 443
  default_action {
    type             = "forward"
    target_group_arn = aws_lb_target_group.routers.arn
  }
}

resource "aws_lb_listener" "metrics" {
  # checkov:skip=CKV_AWS_2: TCP goes through as it is, TLS within.
  # checkov:skip=CKV_AWS_103: The routers choose the versions of TLS.
  for_each          = var.metrics_ports
  load_balancer_arn = aws_lb.this.arn
  protocol          = "TCP"
  port              = each.value
  default_action {
    type             = "forward"
    target_group_arn = aws_lb_target_group.metrics[each.key].arn
  }
}
