variable "name" {
  description = "Prefix of names."
  type        = string
  validation {
    condition     = length(var.name) <= 19
    error_message = "name: at most 19 characters, because AWS takes 32 for a target group."
  }
}

variable "vpc_id" {
  description = "The VPC."
  type        = string
}

variable "subnet_id" {
  description = "The routers' public subnet."
  type        = string
}

variable "instance_ids" {
  description = "The routers' machines by name."
  type        = map(string)
}

variable "metrics_ports" {
  description = "A port per router by name: the balancer's, for those that scrape."
  type        = map(number)
}

variable "router_security_group_id" {
  description = "The routers' security group."
  type        = string
}

variable "client_cidrs" {
  description = "IPv4 networks whose clients may reach port 443."
  type        = list(string)
}

variable "metrics_cidrs" {
  description = "IPv4 networks of those that scrape."
  type        = list(string)
}

variable "drain_s" {
  description = "Seconds that open connections have after a router has left."
  type        = number
}
