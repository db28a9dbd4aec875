# Without a provider: `terraform init -backend=false && terraform test` in this module, on any machine.

variables {
  name         = "gorgo-test"
  regions_file = "tests/fleet.yaml"
  places       = { us-ashburn = "us-east-1", eu-frankfurt = "eu-central-1" }
  model        = { repository = "owner/model", served_name = "model" }
  engine_image = "lmsysorg/sglang@sha256:5555555555555555555555555555555555555555555555555555555555555555"
  secrets      = { prefix = "/gorgo/test" }
  server_name  = "llm.example.org"
  artefacts    = "s3://gorgo-test"
  package = {
    wheel       = "gorgo_router-0.2.0-py3-none-any.whl"
    sha256      = "0000000000000000000000000000000000000000000000000000000000000000"
    lock_sha256 = "1111111111111111111111111111111111111111111111111111111111111111"
  }
}

run "two_replicas_of_two_gpus_share_an_instance_of_four" {
  command = plan
  assert {
    condition     = output.instances["us-ashburn-2xl40s-0"].type == "g6e.12xlarge" && output.instances["us-ashburn-2xl40s-0"].engines == ["a", "c"]
    error_message = "The first two of the file share the first instance."
  }
  assert {
    condition     = output.engines["a"].gpus == "0,1" && output.engines["c"].gpus == "2,3" && output.engines["a"].port == 30000 && output.engines["c"].port == 30001
    error_message = "They have GPUs and ports of their own."
  }
  assert {
    condition     = output.engines["a"].address == output.engines["c"].address && output.engines["b"].address != output.engines["a"].address
    error_message = "The third is on an instance of its own."
  }
}

run "an_instance_each_where_that_is_wanted" {
  command = plan
  variables {
    share_instances = false
  }
  assert {
    condition     = length(output.instances) == 5 && length(distinct(values(output.instances)[*].address)) == 5
    error_message = "Five replicas, five instances, five addresses."
  }
}

run "the_smallest_instance_with_enough_gpus" {
  command = plan
  assert {
    condition     = output.instances["us-ashburn-8xl40s-0"].type == "g6e.48xlarge" && output.instances["eu-frankfurt-1xl4-0"].type == "g6.2xlarge"
    error_message = "8x L40S need a g6e.48xlarge, 1x L4 a g6.2xlarge."
  }
  assert {
    condition     = output.instances["us-ashburn-2xl40s-1"].gpus_used == 2 && output.instances["us-ashburn-2xl40s-1"].gpus == 4
    error_message = "What stands idle is told."
  }
}

run "addresses_follow_the_order_of_regions_and_groups" {
  command = plan
  assert {
    condition     = output.networks["us-ashburn"].cidr == "10.64.0.0/16" && output.networks["eu-frankfurt"].cidr == "10.66.0.0/16"
    error_message = "A region without anything keeps its place in the count."
  }
  assert {
    condition     = !contains(keys(output.networks), "nobody")
    error_message = "A region without router and replicas gets no network."
  }
  assert {
    condition     = output.engines["a"].address == "10.64.16.10" && output.engines["b"].address == "10.64.16.11" && output.engines["big"].address == "10.64.17.10"
    error_message = "Each group of a region has 256 addresses of its own."
  }
  assert {
    condition     = output.networks["us-ashburn"].last_port == 30001 && output.networks["eu-frankfurt"].last_port == 30000 && output.peered == ["eu-frankfurt"]
    error_message = "Ports as far as they are used; a link to each other region."
  }
}

run "the_routers_file_keeps_what_people_wrote" {
  command = plan
  assert {
    condition     = yamldecode(output.regions_generated).replicas[4].draining && yamldecode(output.regions_generated).limits.max_in_flight == 100
    error_message = "Draining marks and limits stay."
  }
  assert {
    condition     = [for replica in yamldecode(output.regions_generated).replicas : replica.name] == ["a", "c", "b", "big", "one"]
    error_message = "So does the order."
  }
  assert {
    condition     = yamldecode(output.regions_generated).replicas[1].url == "http://10.64.16.10:30001" && yamldecode(output.regions_generated).replicas[1].capacity.max_running_requests == 16
    error_message = "Addresses are filled in."
  }
  assert {
    condition     = yamldecode(output.regions_generated).proxy.bind == "127.0.0.1:8080" && yamldecode(output.regions_generated).proxy.admin_bind == "127.0.0.1:9090"
    error_message = "The proxy is reached through TLS alone."
  }
}

run "engines_are_started_as_the_router_believes" {
  command = plan
  assert {
    condition     = strcontains(output.engine_units["gorgo-engine-c.service"], "--max-running-requests 16 ") && strcontains(output.engine_units["gorgo-engine-a.service"], "--max-running-requests 64 ")
    error_message = "The running batch is that of regions.yaml, 64 by default."
  }
  assert {
    condition     = strcontains(output.engine_units["gorgo-engine-c.service"], "\"device=2,3\"") && strcontains(output.engine_units["gorgo-engine-c.service"], "--tp-size 2 ")
    error_message = "GPUs and tensor parallelism go together."
  }
}

run "the_grace_period_fits_the_unit" {
  command = plan
  assert {
    condition     = strcontains(output.router_units["gorgo.service"], "TimeoutStopSec=23\n") && strcontains(output.router_units["gorgo.service"], "LimitNOFILE=1224\n")
    error_message = "12.5 s of grace and 10 more; two sockets for each of 100 requests and 1024 more."
  }
}

run "no_tuner_where_none_is_wanted" {
  command = plan
  variables {
    tuner = { enabled = false }
  }
  assert {
    condition     = !contains(keys(output.router_units), "gorgo-tuner.service") && !strcontains(output.router.user_data, "gorgo-tuner.service") && !contains(output.scraped[*].job, "gorgo-tuner")
    error_message = "Neither unit nor scrape."
  }
}

run "a_fleet_that_cannot_be_sized_is_refused" {
  command = plan
  variables {
    regions_file = "tests/unsized.yaml"
  }
  expect_failures = [output.instances]
}

run "a_replica_in_no_region_is_refused" {
  command = plan
  variables {
    regions_file = "tests/elsewhere.yaml"
  }
  expect_failures = [output.networks]
}

run "another_engine_is_refused" {
  command = plan
  variables {
    regions_file = "tests/engines.yaml"
  }
  expect_failures = [output.instances]
}

run "files_of_another_machine_are_refused" {
  command = plan
  variables {
    regions_file = "tests/files.yaml"
  }
  expect_failures = [output.regions_generated]
}

run "a_region_without_a_place_is_refused" {
  command = plan
  variables {
    places = { us-ashburn = "us-east-1" }
  }
  expect_failures = [output.networks]
}

run "bad_variables_are_refused" {
  command = plan
  variables {
    name          = "Gorgo"
    places        = { us-ashburn = "Virginia", eu-frankfurt = "Virginia" }
    base_cidr     = "10.64.0.0/16"
    engine_image  = "lmsysorg/sglang:latest"
    server_name   = "localhost"
    metrics_cidrs = ["0.0.0.0/0"]
    artefacts     = "gorgo-test"
    model         = { repository = "model", revision = "main", served_name = "a b", context_length = 10 }
    tuner         = { algorithm = "magic", mode = "switchback" }
    secrets       = { prefix = "gorgo" }

    engine_arguments = ["--api-key", "$(id)"]
  }
  expect_failures = [
    var.name, var.places, var.base_cidr, var.engine_image, var.server_name, var.metrics_cidrs, var.artefacts, var.model, var.tuner,
    var.secrets, var.engine_arguments,
  ]
}

run "an_image_by_tag_is_refused" {
  command = plan
  variables {
    engine_image = "lmsysorg/sglang:v0.5.23"
  }
  expect_failures = [var.engine_image]
}

run "an_image_by_tag_is_taken_where_a_variable_says_so" {
  command = plan
  variables {
    engine_image        = "lmsysorg/sglang:v0.5.23"
    engine_image_by_tag = true
  }
}

run "one_router_by_itself" {
  command = plan
  assert {
    condition     = output.router.machines == { gorgo-test-router = "10.64.0.10" } && alltrue([for one in output.scraped : one.ports == [443]])
    error_message = "One machine, one port."
  }
}

run "second_router_has_the_next_address_and_a_port_of_its_own_for_scrapes" {
  command = plan
  variables {
    routers = 2
  }
  assert {
    condition     = output.router.machines == { gorgo-test-router = "10.64.0.10", gorgo-test-router-2 = "10.64.0.11" }
    error_message = "Two machines beside each other."
  }
  assert {
    condition     = output.scraped[0].ports == [8441, 8442] && output.scraped[2].ports == [443]
    error_message = "Both proxies are scraped; replicas through either."
  }
}

run "more_routers_are_refused" {
  command = plan
  variables {
    routers = 3
  }
  expect_failures = [var.routers]
}

run "store_is_in_the_routers_file_and_its_secrets_in_their_environment" {
  command = plan
  variables {
    routers = 2
    store   = { enabled = true, address = "store.internal" }
  }
  assert {
    condition     = yamldecode(output.regions_generated).shared == { url = "rediss://store.internal:6379/0", group = "gorgo-test", password_env = "GORGO_STORE_PASSWORD", key_env = "GORGO_GROUP_KEY" }
    error_message = "Address, group and the names of both secrets."
  }
  assert {
    condition     = contains(output.secret_names.router, "/gorgo/test/group-key") && strcontains(output.router.user_data, "-py3-none-any.whl[shared]")
    error_message = "The group's key is read, and the store's client installed."
  }
}

run "without_a_store_nothing_is_shared" {
  command = plan
  assert {
    condition     = !can(yamldecode(output.regions_generated).shared) && length(output.secret_names.router) == 5 && !strcontains(output.router.user_data, "store-password")
    error_message = "Neither the section nor its secrets."
  }
}
