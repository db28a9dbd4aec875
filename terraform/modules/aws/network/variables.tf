variable "name" {
  description = "Prefix of names."
  type        = string
}

variable "network" {
  description = "This region's part of the core module's output `networks`."
  type = object({
    cidr           = string
    public_cidr    = string
    private_cidr   = string
    has_replicas   = bool
    instance_types = list(string)
  })
}

variable "zone" {
  description = "Availability zone of the subnets; null takes the first that offers every instance type."
  type        = string
  default     = null
  validation {
    condition     = var.zone == null || can(regex("^[a-z]{2,3}(-[a-z]+)+-[0-9][a-z]$", var.zone))
    error_message = "zone: expected a zone such as us-east-1a."
  }
}

variable "more_instance_types" {
  description = "Instance types that the zone must offer beside those of the network."
  type        = list(string)
  default     = []
}
