variable "name" {
  description = "Prefix of names."
  type        = string
}

variable "router" {
  description = "The core module's output `router`."
  type        = object({ machines = map(string), user_data = string, has_history = bool })
}

variable "balancer" {
  description = "Security group of the balancer before the routers; null: clients reach the router itself."
  type        = object({ security_group_id = string })
  default     = null
}

variable "vpc_id" {
  description = "The VPC."
  type        = string
}

variable "subnet_id" {
  description = "The public subnet."
  type        = string
}

variable "instance_type" {
  description = "Type of the router's machine: one core for the proxy, one for TLS, one for the tuner."
  type        = string
  default     = "c7i.xlarge"
}

variable "image_parameter" {
  description = "Public SSM parameter that names the machine image: Amazon Linux 2023."
  type        = string
  default     = "/aws/service/ami-amazon-linux-latest/al2023-ami-kernel-default-x86_64"
}

variable "client_cidrs" {
  description = "IPv4 networks whose clients may reach port 443."
  type        = list(string)
  validation {
    condition     = length(var.client_cidrs) > 0 && alltrue([for cidr in var.client_cidrs : can(cidrnetmask(cidr))])
    error_message = "client_cidrs: expected at least one IPv4 network."
  }
}

variable "metrics_cidrs" {
  description = "IPv4 networks of those that scrape, which reach port 443 too."
  type        = list(string)
  default     = []
}

variable "replicas" {
  description = "Where the engines are: address range and ports, by region."
  type        = map(object({ private_cidr = string, first_port = number, last_port = number }))
}

variable "secrets" {
  description = "ARNs of the parameters that the router reads, and of the customer's key that encrypts them (null: the account's aws/ssm)."
  type        = object({ parameter_arns = list(string), key_arn = optional(string) })
}

variable "bucket" {
  description = "Name of the bucket for wheel and configuration; made here, and emptied and removed with the rest."
  type        = string
  validation {
    condition     = can(regex("^[a-z0-9][a-z0-9-]{2,62}$", var.bucket))
    error_message = "bucket: expected 3 to 63 of a-z, 0-9 and -."
  }
}

variable "package_files" {
  description = "Paths of the wheel and of its requirements.lock, by the name they get."
  type        = map(string)
  validation {
    condition     = alltrue([for path in values(var.package_files) : fileexists(path)])
    error_message = "package_files: a file is not there; `python -m pip wheel --no-deps -w dist .` makes the wheel."
  }
}

variable "configuration" {
  description = "The core module's output `configuration`: texts by file name, which the router follows."
  type        = map(string)
}
