# A group of replicas that follows gorgo_replicas_wanted. The router's machine sets its size (follow.sh, output `unit`):
# the number is the router's, and no alarm, step or target stands between. Read docs/scaling.md first.

resource "aws_autoscaling_group" "this" {
  name                      = var.name
  min_size                  = 1
  max_size                  = var.most
  vpc_zone_identifier       = var.subnet_ids
  health_check_type         = "EC2"
  wait_for_capacity_timeout = "0"
  # The newest has the least in its cache.
  termination_policies = ["NewestInstance"]

  launch_template {
    id      = var.launch_template_id
    version = var.launch_template_version
  }

  # An instance that leaves is drained first: follow.sh removes it from the router, which waits for open answers.
  initial_lifecycle_hook {
    name                 = "drain"
    lifecycle_transition = "autoscaling:EC2_INSTANCE_TERMINATING"
    heartbeat_timeout    = var.drain_s
    default_result       = "CONTINUE"
  }

  tag {
    key                 = "Name"
    value               = var.name
    propagate_at_launch = true
  }

  lifecycle {
    ignore_changes = [desired_capacity] # the router sets it
  }
}

resource "aws_iam_role_policy" "follow" {
  # checkov:skip=CKV_AWS_290: Describing knows no resources; a constraint would be none.
  # checkov:skip=CKV_AWS_355: The same: AWS takes nothing but a star for it.
  name = "${var.name}-follow"
  role = var.router_role
  policy = jsonencode({
    Version = "2012-10-17"
    Statement = [
      {
        Effect   = "Allow"
        Action   = ["autoscaling:SetDesiredCapacity", "autoscaling:CompleteLifecycleAction"]
        Resource = [aws_autoscaling_group.this.arn]
      },
      {
        Effect   = "Allow"
        Action   = ["autoscaling:DescribeAutoScalingGroups", "ec2:DescribeInstances"]
        Resource = ["*"] # these know no resources
      },
    ]
  })
}
