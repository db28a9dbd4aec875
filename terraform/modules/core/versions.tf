# No provider: what is decided here can be planned and tested on any machine, without a cloud or a network.
terraform {
  required_version = ">= 1.9"
}
