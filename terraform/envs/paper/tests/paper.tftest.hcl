# The AWS provider's schema, and no cloud: needs the provider plugin, `terraform init -plugin-dir=DIR`.

mock_provider "aws" {
  alias = "us_ashburn"
  mock_data "aws_ec2_instance_type_offerings" {
    defaults = { locations = ["us-east-1d", "us-east-1b"] }
  }
  mock_data "aws_caller_identity" {
    defaults = { account_id = "123456789012" }
  }
  mock_data "aws_ssm_parameter" {
    defaults = { value = "0123456789abcdef0123456789abcdef", insecure_value = "ami-1" }
  }
  mock_resource "aws_elasticache_replication_group" {
    defaults = { primary_endpoint_address = "master.gorgo-paper-store.abc.use1.cache.amazonaws.com" }
  }
  mock_resource "aws_lb" {
    defaults = { arn = "arn:aws:elasticloadbalancing:us-east-1:123456789012:loadbalancer/net/routers/1" }
  }
  mock_resource "aws_lb_target_group" {
    defaults = { arn = "arn:aws:elasticloadbalancing:us-east-1:123456789012:targetgroup/routers/1" }
  }
}

mock_provider "aws" {
  alias = "eu_frankfurt"
  mock_data "aws_ec2_instance_type_offerings" {
    defaults = { locations = ["eu-central-1a"] }
  }
}

mock_provider "aws" {
  alias = "ap_seoul"
  mock_data "aws_ec2_instance_type_offerings" {
    defaults = { locations = ["ap-northeast-2c"] }
  }
}

variables {
  server_name   = "llm.example.org"
  client_cidrs  = ["198.51.100.0/24"]
  engine_image  = "lmsysorg/sglang@sha256:5555555555555555555555555555555555555555555555555555555555555555"
  metrics_cidrs = ["203.0.113.7/32"]
  wheel         = "tests/gorgo_router-0.0.0-py3-none-any.whl"
}

run "the_papers_fleet" {
  command = apply
  assert {
    condition     = length(output.replica_instance_ids) == 3
    error_message = "One instance in each of three regions."
  }
  assert {
    condition     = yamldecode(output.regions_generated).proxy.region == "us-ashburn"
    error_message = "The proxy is in Virginia."
  }
  assert {
    condition     = output.secret_names.place == "us-east-1"
    error_message = "Secrets are where the router is."
  }
}

run "two_routers_behind_one_address" {
  command = apply
  variables {
    routers = 2
  }
  assert {
    condition     = toset(keys(output.router_instance_ids)) == toset(["gorgo-paper-router", "gorgo-paper-router-2"])
    error_message = "Two machines."
  }
  assert {
    condition     = length(module.balancer) == 1 && output.public_address == module.balancer[0].public_address
    error_message = "Clients use the balancer's address."
  }
}

run "two_routers_report_to_each_other_in_a_store" {
  command = apply
  variables {
    routers = 2
    store   = { enabled = true }
  }
  assert {
    condition     = yamldecode(output.regions_generated).shared.url == "rediss://${output.store_address}:6379/0" && yamldecode(output.regions_generated).shared.group == "gorgo-paper"
    error_message = "The configuration names the store, over TLS, and the group."
  }
  assert {
    condition     = contains(output.secret_names.router, "/gorgo/paper/group-key") && contains(output.secret_names.router, "/gorgo/paper/store-password")
    error_message = "The routers read the group's key and the store's password."
  }
}

run "store_takes_nobody_but_the_routers_over_tls_and_with_a_password" {
  command = apply
  module {
    source = "../../modules/aws/store"
  }
  providers = { aws = aws.us_ashburn }
  variables {
    name                     = "gorgo-test"
    vpc_id                   = "vpc-1"
    subnet_id                = "subnet-1"
    router_security_group_id = "sg-1"
    password_parameter       = "/gorgo/test/store-password"
  }
  assert {
    condition     = aws_elasticache_replication_group.this.transit_encryption_enabled && aws_elasticache_replication_group.this.transit_encryption_mode == "required" && aws_elasticache_replication_group.this.auth_token == "0123456789abcdef0123456789abcdef"
    error_message = "TLS alone, and the password of the parameter."
  }
  assert {
    condition     = aws_vpc_security_group_ingress_rule.routers.referenced_security_group_id == "sg-1" && aws_vpc_security_group_ingress_rule.routers.from_port == 6379 && aws_vpc_security_group_ingress_rule.routers.to_port == 6379
    error_message = "In: the store's port, from the routers."
  }
  assert {
    condition     = aws_vpc_security_group_egress_rule.routers.security_group_id == "sg-1" && aws_vpc_security_group_egress_rule.routers.from_port == 6379
    error_message = "Out of the routers: the store's port."
  }
  assert {
    condition     = aws_elasticache_replication_group.this.num_cache_clusters == 1 && aws_elasticache_replication_group.this.snapshot_retention_limit == 0
    error_message = "One node, and no copies of what it has."
  }
}

run "balancer_passes_tls_on_and_has_a_port_per_router_for_scrapes" {
  command = apply
  module {
    source = "../../modules/aws/balancer"
  }
  providers = { aws = aws.us_ashburn }
  variables {
    name                     = "gorgo-test"
    vpc_id                   = "vpc-1"
    subnet_id                = "subnet-1"
    instance_ids             = { one = "i-1", two = "i-2" }
    metrics_ports            = { one = 8441, two = 8442 }
    router_security_group_id = "sg-1"
    drain_s                  = 60
  }
  assert {
    condition     = aws_lb_listener.routers.port == 443 && aws_lb_listener.routers.protocol == "TCP" && aws_lb_target_group.routers.preserve_client_ip == "true"
    error_message = "TCP as it is: TLS ends on the routers, which see the client's address."
  }
  assert {
    condition     = aws_lb_target_group.routers.health_check[0].path == "/ready" && aws_lb_target_group.routers.health_check[0].protocol == "HTTPS"
    error_message = "A router that is not ready gets no connections."
  }
  assert {
    condition     = toset([for listener in aws_lb_listener.metrics : listener.port]) == toset([8441, 8442]) && length(aws_lb_target_group_attachment.metrics) == 2
    error_message = "A port per router for those that scrape."
  }
  assert {
    condition     = toset([for rule in merge(aws_vpc_security_group_ingress_rule.tls, aws_vpc_security_group_ingress_rule.metrics) : "${rule.cidr_ipv4} ${rule.from_port}"]) == toset(["198.51.100.0/24 443", "203.0.113.7/32 443", "203.0.113.7/32 8441", "203.0.113.7/32 8442"])
    error_message = "In: 443 from clients, and the other ports from those that scrape."
  }
}

run "routers_behind_a_balancer_are_reached_by_it_alone" {
  command = apply
  module {
    source = "../../modules/aws/router"
  }
  providers = { aws = aws.us_ashburn }
  variables {
    name          = "gorgo-test"
    router        = { machines = { one = "10.64.0.10", two = "10.64.0.11" }, user_data = "#cloud-config\n", has_history = true }
    balancer      = { security_group_id = "sg-2" }
    vpc_id        = "vpc-1"
    subnet_id     = "subnet-1"
    replicas      = { us-ashburn = { private_cidr = "10.64.16.0/20", first_port = 30000, last_port = 30001 } }
    secrets       = { parameter_arns = ["arn:aws:ssm:us-east-1:123456789012:parameter/gorgo/test/engine-key"] }
    bucket        = "gorgo-test"
    package_files = {}
    configuration = { "regions.yaml" = "" }
  }
  assert {
    condition     = length(aws_vpc_security_group_ingress_rule.tls) == 0 && aws_vpc_security_group_ingress_rule.balancer[0].referenced_security_group_id == "sg-2"
    error_message = "In: the balancer, and no network."
  }
  assert {
    condition     = aws_instance.this["two"].private_ip == "10.64.0.11" && length(aws_eip.this) == 2
    error_message = "Two machines, each with its way out."
  }
}

run "only_what_is_needed_is_open" {
  command = apply
  module {
    source = "../../modules/aws/router"
  }
  providers = { aws = aws.us_ashburn }
  variables {
    name          = "gorgo-test"
    router        = { machines = { one = "10.64.0.10" }, user_data = "#cloud-config\n", has_history = false }
    vpc_id        = "vpc-1"
    subnet_id     = "subnet-1"
    replicas      = { us-ashburn = { private_cidr = "10.64.16.0/20", first_port = 30000, last_port = 30001 } }
    secrets       = { parameter_arns = ["arn:aws:ssm:us-east-1:123456789012:parameter/gorgo/test/engine-key"] }
    bucket        = "gorgo-test"
    package_files = {}
    configuration = { "regions.yaml" = "" }
  }
  assert {
    condition     = toset([for rule in aws_vpc_security_group_ingress_rule.tls : "${rule.cidr_ipv4} ${rule.from_port}-${rule.to_port}"]) == toset(["198.51.100.0/24 443-443", "203.0.113.7/32 443-443"])
    error_message = "In: port 443, from those who were named."
  }
  assert {
    condition     = aws_vpc_security_group_egress_rule.engines["us-ashburn"].to_port == 30001 && aws_vpc_security_group_egress_rule.https.to_port == 443
    error_message = "Out: the engines' ports, and HTTPS."
  }
  assert {
    condition     = aws_instance.this["one"].metadata_options[0].http_tokens == "required" && aws_instance.this["one"].root_block_device[0].encrypted && aws_instance.this["one"].root_block_device[0].delete_on_termination
    error_message = "Tokens for metadata; an encrypted volume that goes with the machine."
  }
  assert {
    condition     = jsondecode(aws_iam_role_policy.reads.policy).Statement[0].Resource == ["arn:aws:ssm:us-east-1:123456789012:parameter/gorgo/test/engine-key"]
    error_message = "The parameters that were named, and no other."
  }
  assert {
    condition     = aws_s3_bucket.this.force_destroy
    error_message = "destroy empties the bucket."
  }
}

run "replicas_are_reached_by_the_router_alone" {
  command = apply
  module {
    source = "../../modules/aws/replica_pool"
  }
  providers = { aws = aws.ap_seoul }
  variables {
    name             = "gorgo-test-ap-seoul"
    instances        = { one = { type = "g6e.12xlarge", address = "10.66.16.10", name = "one", user_data = "#cloud-config\n" } }
    network          = { first_port = 30000, last_port = 30001, private_cidr = "10.66.16.0/20" }
    vpc_id           = "vpc-1"
    subnet_id        = "subnet-1"
    router_addresses = ["10.64.0.10", "10.64.0.11"]
    secrets          = { parameter_arns = ["arn:aws:ssm:us-east-1:123456789012:parameter/gorgo/test/engine-key"], key_arn = "arn:aws:kms:us-east-1:123456789012:key/k" }
  }
  assert {
    condition     = toset([for rule in aws_vpc_security_group_ingress_rule.engines : "${rule.cidr_ipv4} ${rule.from_port}-${rule.to_port}"]) == toset(["10.64.0.10/32 30000-30001", "10.64.0.11/32 30000-30001"])
    error_message = "In: the engines' ports, from the routers."
  }
  assert {
    condition     = !aws_instance.this["one"].associate_public_ip_address && aws_instance.this["one"].private_ip == "10.66.16.10"
    error_message = "No public address; the private one as computed."
  }
  assert {
    condition     = length(aws_autoscaling_group.this) == 0 && length(aws_iam_role_policy.address) == 0
    error_message = "Instances on demand stay where they are, and may take no address."
  }
  assert {
    condition     = jsondecode(aws_iam_role_policy.secrets.policy).Statement[1].Action == ["kms:Decrypt"]
    error_message = "A key of one's own may be used to decrypt."
  }
}

run "spot_replicas_are_in_groups_that_replace_them" {
  command = apply
  module {
    source = "../../modules/aws/replica_pool"
  }
  providers = { aws = aws.ap_seoul }
  variables {
    name             = "gorgo-test-ap-seoul"
    instances        = { one = { type = "g6e.12xlarge", address = "10.66.16.10", name = "one", user_data = "#cloud-config\n" } }
    network          = { first_port = 30000, last_port = 30001, private_cidr = "10.66.16.0/20" }
    vpc_id           = "vpc-1"
    subnet_id        = "subnet-1"
    router_addresses = ["10.64.0.10", "10.64.0.11"]
    secrets          = { parameter_arns = ["arn:aws:ssm:us-east-1:123456789012:parameter/gorgo/test/engine-key"] }
    spot             = true
  }
  assert {
    condition     = length(aws_instance.this) == 0 && aws_autoscaling_group.this["one"].desired_capacity == 1 && aws_autoscaling_group.this["one"].capacity_rebalance
    error_message = "A group of one that starts the next instance before AWS takes the one away."
  }
  assert {
    condition     = aws_autoscaling_group.this["one"].mixed_instances_policy[0].instances_distribution[0].on_demand_percentage_above_base_capacity == 0
    error_message = "Spot alone."
  }
  assert {
    condition     = aws_autoscaling_group.this["one"].instance_refresh[0].preferences[0].min_healthy_percentage == 100
    error_message = "A changed first-boot text replaces an instance once the next one is there."
  }
  assert {
    condition     = base64decode(aws_launch_template.this["one"].user_data) == "#cloud-config\n" && aws_launch_template.this["one"].metadata_options[0].http_tokens == "required"
    error_message = "The same first boot and the same metadata as without a group."
  }
  assert {
    condition     = aws_ec2_subnet_cidr_reservation.replicas[0].cidr_block == "10.66.16.0/21"
    error_message = "No instance boots with a replica's address."
  }
  assert {
    condition     = jsondecode(aws_iam_role_policy.address[0].policy).Statement[0].Action == ["ec2:AssignPrivateIpAddresses"]
    error_message = "An instance may take its address, and do nothing else."
  }
}

run "the_first_zone_that_offers_the_instances" {
  command = apply
  module {
    source = "../../modules/aws/network"
  }
  providers = { aws = aws.us_ashburn }
  variables {
    name    = "gorgo-test"
    network = { cidr = "10.64.0.0/16", public_cidr = "10.64.0.0/24", private_cidr = "10.64.16.0/20", has_replicas = true, instance_types = ["g6e.12xlarge"] }
  }
  assert {
    condition     = aws_subnet.private[0].availability_zone == "us-east-1b" && aws_subnet.public.availability_zone == "us-east-1b"
    error_message = "One zone for both subnets."
  }
}

run "a_region_without_the_instances_is_refused" {
  command = plan
  module {
    source = "../../modules/aws/network"
  }
  providers = { aws = aws.us_ashburn }
  variables {
    name    = "gorgo-test"
    network = { cidr = "10.64.0.0/16", public_cidr = "10.64.0.0/24", private_cidr = "10.64.16.0/20", has_replicas = true, instance_types = ["g6e.12xlarge"] }
  }
  override_data {
    target = data.aws_ec2_instance_type_offerings.wanted
    values = { locations = [] }
  }
  expect_failures = [aws_vpc.this]
}
