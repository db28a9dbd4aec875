variable "name" {
  description = "Prefix of names; also of the role, which is the account's and so must differ by region."
  type        = string
}

variable "instances" {
  description = "This region's part of the core module's output `instances`."
  type = map(object({
    type      = string
    address   = string
    name      = string
    user_data = string
  }))
}

variable "network" {
  description = "This region's part of the core module's output `networks`: the engines' first and last port, and the private range."
  type        = object({ first_port = number, last_port = number, private_cidr = string })
}

variable "vpc_id" {
  description = "The VPC."
  type        = string
}

variable "subnet_id" {
  description = "The private subnet."
  type        = string
}

variable "router_addresses" {
  description = "The routers' private IPv4 addresses: the only ones that may reach the engines."
  type        = list(string)
}

variable "secrets" {
  description = "ARNs of the parameters that engines read, and of the customer's key that encrypts them (null: the account's aws/ssm)."
  type        = object({ parameter_arns = list(string), key_arn = optional(string) })
}

variable "spot" {
  description = "Spot instances in groups that replace them: about a third of the price, and AWS may take one away with two minutes' notice. Their first-boot texts take their addresses (`grouped` of the core module)."
  type        = bool
  default     = false
}

variable "image_parameter" {
  description = "Public SSM parameter that names the machine image: NVIDIA's driver, Docker with its GPU runtime, AWS CLI, SSM agent."
  type        = string
  default     = "/aws/service/deeplearning/ami/x86_64/base-oss-nvidia-driver-gpu-ubuntu-22.04/latest/ami-id"
}

variable "volume_gib" {
  description = "Size of the root volume: the container image, and the model once per instance."
  type        = number
  default     = 200
  validation {
    condition     = var.volume_gib >= 100 && var.volume_gib <= 16384
    error_message = "volume_gib: expected 100 to 16384."
  }
}
