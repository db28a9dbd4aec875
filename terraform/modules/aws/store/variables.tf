variable "name" {
  description = "Prefix of names."
  type        = string
}

variable "vpc_id" {
  description = "The VPC."
  type        = string
}

variable "subnet_id" {
  description = "The routers' subnet."
  type        = string
}

variable "router_security_group_id" {
  description = "The routers' security group, which gets a way out to the store."
  type        = string
}

variable "password_parameter" {
  description = "Name of the parameter with the password."
  type        = string
}

variable "node_type" {
  description = "Type of the node; a report has half a kilobyte, ten a second from each router."
  type        = string
  default     = "cache.t4g.micro"
  validation {
    condition     = can(regex("^cache\\.[a-z0-9]+\\.[a-z0-9]+$", var.node_type))
    error_message = "node_type: expected a type such as cache.t4g.micro."
  }
}
