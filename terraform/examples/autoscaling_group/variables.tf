variable "name" {
  description = "Name of the group and prefix of the names beside it"
  type        = string
}

variable "region" {
  description = "Region of the replicas in regions.yaml, as the metric has it"
  type        = string
}

variable "model" {
  description = "Model of the replicas as the metric has it: the first one that they list, or none"
  type        = string
  default     = "none"
}

variable "most" {
  description = "Most replicas; no more than scaling.max_replicas asks for"
  type        = number
}

variable "subnet_ids" {
  description = "Private subnets of the replicas"
  type        = list(string)
}

variable "launch_template_id" {
  description = "Launch template of a replica: an engine on port, which its instance starts at boot"
  type        = string
}

variable "launch_template_version" {
  description = "Its version, as latest_version of the template's resource has it"
  type        = string
}

variable "port" {
  description = "Port of the engine"
  type        = number
  default     = 30000
}

variable "router_role" {
  description = "Name of the router's IAM role, which may set the size of this group and read its members"
  type        = string
}

variable "drain_s" {
  description = "Time for the open answers of an instance that leaves, s"
  type        = number
  default     = 300
}
