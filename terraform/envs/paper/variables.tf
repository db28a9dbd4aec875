variable "name" {
  description = "Prefix of the name of everything that is made."
  type        = string
  default     = "gorgo-paper"
}

variable "regions_file" {
  description = "The fleet. Another one needs `python terraform/generate.py --regions FILE` first."
  type        = string
  default     = "../../../regions.yaml"
}

variable "server_name" {
  description = "DNS name of the router, as in its TLS certificate; point it at the output `public_address`."
  type        = string
}

variable "client_cidrs" {
  description = "IPv4 networks whose clients may reach the router."
  type        = list(string)
}

variable "metrics_cidrs" {
  description = "IPv4 networks that may read /metrics of router, tuner and replicas."
  type        = list(string)
  default     = []
}

variable "wheel" {
  description = "GORGO's wheel, made by `python -m pip wheel --no-deps -w dist .`."
  type        = string
  validation {
    condition     = fileexists(var.wheel)
    error_message = "wheel: there is no such file; `python -m pip wheel --no-deps -w dist .` makes it."
  }
}

variable "lock_file" {
  description = "Versions and hashes of what the wheel needs."
  type        = string
  default     = "../../../requirements.lock"
}

variable "model" {
  description = "What the replicas serve: repository on Hugging Face, revision (a commit; null is the newest), served name, context length."
  type = object({
    repository     = string
    revision       = optional(string)
    served_name    = string
    context_length = optional(number, 32768)
  })
  default = { repository = "Qwen/Qwen3.5-35B-A3B-FP8", served_name = "qwen3.5-35b-a3b" }
}

variable "engine_image" {
  description = "SGLang's container image: name@sha256:digest."
  type        = string
}

variable "engine_image_by_tag" {
  description = "Whether engine_image may be a tag, which can be moved to other content."
  type        = bool
  default     = false
}

variable "engine_arguments" {
  description = "More arguments of sglang.launch_server."
  type        = list(string)
  default     = []
}

variable "share_instances" {
  description = "Put as many replicas of a region on an instance as its GPUs allow."
  type        = bool
  default     = true
}

variable "spot" {
  description = "Spot instances for the replicas, in groups that replace them."
  type        = bool
  default     = false
}

variable "zones" {
  description = "Availability zone by region of regions.yaml, where the first that offers the instances has none left."
  type        = map(string)
  default     = {}
}

variable "secrets_prefix" {
  description = "Prefix of the secrets' names in SSM Parameter Store, in the router's region."
  type        = string
  default     = "/gorgo/paper"
}

variable "secrets_key_arn" {
  description = "ARN of the customer's KMS key that encrypts them; null for the account's aws/ssm."
  type        = string
  default     = null
}

variable "router_instance_type" {
  description = "Type of the router's machine."
  type        = string
  default     = "c7i.xlarge"
}

variable "router_image_parameter" {
  description = "Public SSM parameter that names the router's machine image: Amazon Linux 2023."
  type        = string
  default     = "/aws/service/ami-amazon-linux-latest/al2023-ami-kernel-default-x86_64"
}

variable "gpu_image_parameter" {
  description = "Public SSM parameter that names the replicas' machine image: driver, Docker with GPUs, AWS CLI, SSM agent."
  type        = string
  default     = "/aws/service/deeplearning/ami/x86_64/base-oss-nvidia-driver-gpu-ubuntu-22.04/latest/ami-id"
}

variable "replica_volume_gib" {
  description = "Size of a replica's root volume."
  type        = number
  default     = 200
}

variable "tuner" {
  description = "Whether `gorgo tune` runs beside the proxy, and how."
  type = object({
    enabled   = optional(bool, true)
    algorithm = optional(string, "es")
    mode      = optional(string, "switchback")
  })
  default = {}
}

variable "output_folder" {
  description = "Where apply writes regions.generated.yaml, prometheus.yml and the dashboard on this machine."
  type        = string
  default     = "generated"
}

variable "store" {
  description = "Managed Valkey in which the routers report to each other: TLS, a password, one node. Its password is in the state."
  type = object({
    enabled   = optional(bool, false)
    node_type = optional(string, "cache.t4g.micro")
  })
  default = {}
}

variable "routers" {
  description = "Routers behind one address, 1 or 2; two need a balancer, and without a store each learns alone."
  type        = number
  default     = 1
}
