# Instances with GPUs that run SGLang. No public address, no SSH: a shell comes by SSM, requests by the router alone.

data "aws_ssm_parameter" "image" {
  name = var.image_parameter
}

resource "aws_security_group" "this" {
  name        = "${var.name}-replicas"
  description = "Engines: in from the router alone, out by HTTPS"
  vpc_id      = var.vpc_id
  tags        = { Name = "${var.name}-replicas" }
}

resource "aws_vpc_security_group_ingress_rule" "engines" {
  for_each          = toset(var.router_addresses)
  security_group_id = aws_security_group.this.id
  description       = "A router"
  cidr_ipv4         = "${each.value}/32"
  ip_protocol       = "tcp"
  from_port         = var.network.first_port
  to_port           = var.network.last_port
}

resource "aws_vpc_security_group_egress_rule" "https" {
  security_group_id = aws_security_group.this.id
  description       = "Image, model, secrets, SSM"
  cidr_ipv4         = "0.0.0.0/0"
  ip_protocol       = "tcp"
  from_port         = 443
  to_port           = 443
}

resource "aws_iam_role" "this" {
  name                  = "${var.name}-replicas"
  force_detach_policies = true
  assume_role_policy = jsonencode({
    Version   = "2012-10-17"
    Statement = [{ Effect = "Allow", Action = "sts:AssumeRole", Principal = { Service = "ec2.amazonaws.com" } }]
  })
}

resource "aws_iam_role_policy" "secrets" {
  name = "secrets"
  role = aws_iam_role.this.id
  policy = jsonencode({
    Version = "2012-10-17"
    Statement = concat(
      [{ Effect = "Allow", Action = ["ssm:GetParameter"], Resource = var.secrets.parameter_arns }],
      var.secrets.key_arn == null ? [] : [{ Effect = "Allow", Action = ["kms:Decrypt"], Resource = [var.secrets.key_arn] }],
    )
  })
}

# A shell by SSM. Not AmazonSSMManagedInstanceCore: that one may read every parameter of the account.
resource "aws_iam_role_policy" "sessions" {
  # checkov:skip=CKV_AWS_290: These actions know no resources; a constraint would be none.
  # checkov:skip=CKV_AWS_355: The same: AWS takes nothing but a star for them.
  name = "sessions"
  role = aws_iam_role.this.id
  policy = jsonencode({
    Version = "2012-10-17"
    Statement = [{
      Effect = "Allow"
      Action = [
        "ssm:UpdateInstanceInformation", "ssmmessages:CreateControlChannel", "ssmmessages:CreateDataChannel",
        "ssmmessages:OpenControlChannel", "ssmmessages:OpenDataChannel",
      ]
      Resource = ["*"] # these know no resources
    }]
  })
}

resource "aws_iam_instance_profile" "this" {
  name = "${var.name}-replicas"
  role = aws_iam_role.this.name
}

resource "aws_instance" "this" {
  # checkov:skip=CKV_AWS_126: The engine's and the proxy's own metrics tell more, every 15 s and without a price.
  for_each                    = var.instances
  ami                         = data.aws_ssm_parameter.image.insecure_value
  instance_type               = each.value.type
  subnet_id                   = var.subnet_id
  private_ip                  = each.value.address
  associate_public_ip_address = false
  vpc_security_group_ids      = [aws_security_group.this.id]
  iam_instance_profile        = aws_iam_instance_profile.this.name
  ebs_optimized               = true
  monitoring                  = false
  user_data                   = each.value.user_data
  user_data_replace_on_change = true
  tags                        = { Name = each.value.name }
  volume_tags                 = { Name = each.value.name }

  # Taken away means stopped: the router sees a dead replica. The request persists, so AWS starts the machine again at
  # the same address, with image and model on its volume, as soon as there is capacity. A group could not keep addresses.
  dynamic "instance_market_options" {
    for_each = var.spot ? [1] : []
    content {
      market_type = "spot"
      spot_options {
        spot_instance_type             = "persistent"
        instance_interruption_behavior = "stop"
      }
    }
  }

  metadata_options {
    http_endpoint               = "enabled"
    http_tokens                 = "required"
    http_put_response_hop_limit = 1
  }

  root_block_device {
    volume_type           = "gp3"
    volume_size           = var.volume_gib
    encrypted             = true
    delete_on_termination = true
  }

  lifecycle {
    ignore_changes = [ami] # a newer image is for new instances; a running engine keeps its cache
  }

  depends_on = [aws_iam_role_policy.secrets, aws_iam_role_policy.sessions]
}
