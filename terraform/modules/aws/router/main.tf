# The machines of the proxies: TLS on 443, everything else on their own loopback.

data "aws_ssm_parameter" "image" {
  name = var.image_parameter
}

# -- what it fetches

resource "aws_s3_bucket" "this" {
  # checkov:skip=CKV_AWS_18: A log of who read it would outlive it; one role reads it.
  # checkov:skip=CKV_AWS_21: Everything in it is made from files of the operator's; destroy must leave nothing.
  # checkov:skip=CKV_AWS_144: One machine in the same region reads it.
  # checkov:skip=CKV_AWS_145: A wheel and addresses, no secret; S3's own key does.
  # checkov:skip=CKV2_AWS_61: A handful of objects, each replaced in place.
  # checkov:skip=CKV2_AWS_62: Nobody acts on its changes but the router, which looks.
  bucket        = var.bucket
  force_destroy = true
}

resource "aws_s3_bucket_public_access_block" "this" {
  bucket                  = aws_s3_bucket.this.id
  block_public_acls       = true
  block_public_policy     = true
  ignore_public_acls      = true
  restrict_public_buckets = true
}

resource "aws_s3_bucket_server_side_encryption_configuration" "this" {
  bucket = aws_s3_bucket.this.id
  rule {
    apply_server_side_encryption_by_default {
      sse_algorithm = "AES256"
    }
  }
}

resource "aws_s3_object" "package" {
  for_each    = var.package_files
  bucket      = aws_s3_bucket.this.id
  key         = "package/${each.key}"
  source      = each.value
  source_hash = filesha256(each.value)
}

resource "aws_s3_object" "configuration" {
  for_each     = var.configuration
  bucket       = aws_s3_bucket.this.id
  key          = "configuration/${each.key}"
  content      = each.value
  content_type = "text/plain"
}

# -- what it may do

resource "aws_iam_role" "this" {
  name                  = "${var.name}-router"
  force_detach_policies = true
  assume_role_policy = jsonencode({
    Version   = "2012-10-17"
    Statement = [{ Effect = "Allow", Action = "sts:AssumeRole", Principal = { Service = "ec2.amazonaws.com" } }]
  })
}

resource "aws_iam_role_policy" "reads" {
  name = "reads"
  role = aws_iam_role.this.id
  policy = jsonencode({
    Version = "2012-10-17"
    Statement = concat(
      [
        { Effect = "Allow", Action = ["ssm:GetParameter"], Resource = var.secrets.parameter_arns },
        { Effect = "Allow", Action = ["s3:GetObject"], Resource = ["${aws_s3_bucket.this.arn}/*"] },
      ],
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
  name = "${var.name}-router"
  role = aws_iam_role.this.name
}

# -- who may reach it, and whom it may reach

resource "aws_security_group" "this" {
  name        = "${var.name}-router"
  description = "Router: in by TLS, out to engines and by HTTPS"
  vpc_id      = var.vpc_id
  tags        = { Name = "${var.name}-router" }
}

resource "aws_vpc_security_group_ingress_rule" "tls" {
  for_each          = toset(var.balancer == null ? concat(var.client_cidrs, var.metrics_cidrs) : [])
  security_group_id = aws_security_group.this.id
  description       = "Clients and those that scrape"
  cidr_ipv4         = each.value
  ip_protocol       = "tcp"
  from_port         = 443
  to_port           = 443
}

resource "aws_vpc_security_group_ingress_rule" "balancer" {
  count                        = var.balancer == null ? 0 : 1
  security_group_id            = aws_security_group.this.id
  description                  = "The balancer, which admits the same networks"
  referenced_security_group_id = var.balancer.security_group_id
  ip_protocol                  = "tcp"
  from_port                    = 443
  to_port                      = 443
}

resource "aws_vpc_security_group_egress_rule" "engines" {
  for_each          = var.replicas
  security_group_id = aws_security_group.this.id
  description       = "Engines in ${each.key}"
  cidr_ipv4         = each.value.private_cidr
  ip_protocol       = "tcp"
  from_port         = each.value.first_port
  to_port           = each.value.last_port
}

resource "aws_vpc_security_group_egress_rule" "https" {
  security_group_id = aws_security_group.this.id
  description       = "Packages, S3, SSM"
  cidr_ipv4         = "0.0.0.0/0"
  ip_protocol       = "tcp"
  from_port         = 443
  to_port           = 443
}

# -- the machines

resource "aws_instance" "this" {
  # checkov:skip=CKV_AWS_126: The engine's and the proxy's own metrics tell more, every 15 s and without a price.
  for_each                    = var.router.machines
  ami                         = data.aws_ssm_parameter.image.insecure_value
  instance_type               = var.instance_type
  subnet_id                   = var.subnet_id
  private_ip                  = each.value
  vpc_security_group_ids      = [aws_security_group.this.id]
  iam_instance_profile        = aws_iam_instance_profile.this.name
  ebs_optimized               = true
  monitoring                  = false
  user_data                   = var.router.user_data
  user_data_replace_on_change = true
  tags                        = { Name = each.key }
  volume_tags                 = { Name = each.key }

  metadata_options {
    http_endpoint               = "enabled"
    http_tokens                 = "required"
    http_put_response_hop_limit = 1
  }

  root_block_device {
    volume_type           = "gp3"
    volume_size           = 20
    encrypted             = true
    delete_on_termination = true
  }

  lifecycle {
    ignore_changes = [ami] # a newer image is for a new machine
  }

  depends_on = [
    aws_iam_role_policy.reads, aws_iam_role_policy.sessions, aws_s3_object.package, aws_s3_object.configuration,
  ]
}

# A machine has no way out until it has this: what it fetches at its first boot is tried until it comes.
resource "aws_eip" "this" {
  for_each = var.router.machines
  domain   = "vpc"
  tags     = { Name = each.key }
}

resource "aws_eip_association" "this" {
  for_each      = var.router.machines
  allocation_id = aws_eip.this[each.key].id
  instance_id   = aws_instance.this[each.key].id
}

# -- the tuner's history, which outlives the machine

resource "aws_ebs_volume" "history" {
  # checkov:skip=CKV_AWS_189: Weights and their scores, no secret; the account's key encrypts them.
  # checkov:skip=CKV2_AWS_9: A campaign can be run again; gorgo freeze --export keeps its result.
  for_each          = var.router.has_history ? var.router.machines : {}
  availability_zone = data.aws_subnet.this.availability_zone
  type              = "gp3"
  size              = 8
  encrypted         = true
  tags              = { Name = "${each.key}-history" }
}

resource "aws_volume_attachment" "history" {
  for_each    = aws_ebs_volume.history
  device_name = "/dev/sdh"
  volume_id   = each.value.id
  instance_id = aws_instance.this[each.key].id
  # The file system is unmounted in order before a machine is replaced.
  stop_instance_before_detaching = true
}

data "aws_subnet" "this" {
  id = var.subnet_id
}
