terraform {
  required_version = ">= 1.9"
  required_providers {
    aws = {
      source  = "hashicorp/aws"
      version = "5.100.0"
      # The router's region asks for the link, the other one accepts it.
      configuration_aliases = [aws.router, aws.replicas]
    }
  }
}
