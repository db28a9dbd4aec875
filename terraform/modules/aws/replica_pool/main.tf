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

# An instance of a group boots with any address, and takes that of its replicas by itself (gorgo-address).
data "aws_subnet" "this" {
  id = var.subnet_id
}

resource "aws_iam_role_policy" "address" {
  count = var.spot ? 1 : 0
  name  = "address"
  role  = aws_iam_role.this.id
  policy = jsonencode({
    Version = "2012-10-17"
    Statement = [{
      Effect    = "Allow"
      Action    = ["ec2:AssignPrivateIpAddresses"]
      Resource  = ["arn:aws:ec2:*:*:network-interface/*"]
      Condition = { ArnEquals = { "ec2:Subnet" = data.aws_subnet.this.arn } }
    }]
  })
}

# The lower half has the replicas' addresses (core/sizing.tf): an instance boots with none of them.
resource "aws_ec2_subnet_cidr_reservation" "replicas" {
  count            = var.spot ? 1 : 0
  description      = "Addresses of replicas"
  subnet_id        = var.subnet_id
  cidr_block       = cidrsubnet(var.network.private_cidr, 1, 0)
  reservation_type = "explicit"
}

resource "aws_iam_instance_profile" "this" {
  name = "${var.name}-replicas"
  role = aws_iam_role.this.name
}

resource "aws_instance" "this" {
  # checkov:skip=CKV_AWS_126: The engine's and the proxy's own metrics tell more, every 15 s and without a price.
  for_each                    = var.spot ? {} : var.instances
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

# Spot: a group of one per instance. Where AWS takes one away, or says that it may, the group starts another one, which
# fetches image and model, and takes the address once its engines answer. The router knows the address alone.

data "aws_ami" "image" {
  count = var.spot ? 1 : 0
  filter {
    name   = "image-id"
    values = [data.aws_ssm_parameter.image.insecure_value]
  }
}

resource "aws_launch_template" "this" {
  for_each               = var.spot ? var.instances : {}
  name_prefix            = "${each.value.name}-"
  image_id               = data.aws_ssm_parameter.image.insecure_value
  instance_type          = each.value.type
  ebs_optimized          = true
  user_data              = base64encode(each.value.user_data)
  update_default_version = true

  iam_instance_profile {
    name = aws_iam_instance_profile.this.name
  }

  network_interfaces {
    associate_public_ip_address = false
    delete_on_termination       = true
    security_groups             = [aws_security_group.this.id]
  }

  metadata_options {
    http_endpoint               = "enabled"
    http_tokens                 = "required"
    http_put_response_hop_limit = 1
  }

  block_device_mappings {
    device_name = data.aws_ami.image[0].root_device_name
    ebs {
      volume_type           = "gp3"
      volume_size           = var.volume_gib
      encrypted             = true
      delete_on_termination = true
    }
  }

  tag_specifications {
    resource_type = "volume"
    tags          = { Name = each.value.name }
  }

  lifecycle {
    ignore_changes = [image_id] # as of instances without a group
  }
}

resource "aws_autoscaling_group" "this" {
  for_each                  = aws_launch_template.this
  name                      = var.instances[each.key].name
  min_size                  = 1
  desired_capacity          = 1
  max_size                  = 2 # one that is replaced serves until the next one does
  vpc_zone_identifier       = [var.subnet_id]
  capacity_rebalance        = true
  health_check_type         = "EC2"
  wait_for_capacity_timeout = "0" # a type may have no capacity for hours, and that is no fault of a plan

  mixed_instances_policy {
    instances_distribution {
      on_demand_base_capacity                  = 0
      on_demand_percentage_above_base_capacity = 0
      spot_allocation_strategy                 = "price-capacity-optimized"
    }
    launch_template {
      launch_template_specification {
        launch_template_id = each.value.id
        version            = each.value.latest_version
      }
    }
  }

  instance_refresh {
    strategy = "Rolling"
    preferences {
      min_healthy_percentage = 100
      max_healthy_percentage = 200
    }
  }

  tag {
    key                 = "Name"
    value               = var.instances[each.key].name
    propagate_at_launch = true
  }

  depends_on = [
    aws_iam_role_policy.secrets, aws_iam_role_policy.sessions, aws_iam_role_policy.address, aws_ec2_subnet_cidr_reservation.replicas,
  ]
}
