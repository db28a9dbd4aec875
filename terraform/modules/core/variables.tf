variable "name" {
  description = "Prefix of the name of everything that is made."
  type        = string
  validation {
    condition     = can(regex("^[a-z][a-z0-9-]{1,19}$", var.name))
    error_message = "name: expected 2 to 20 of a-z, 0-9 and -, a letter first."
  }
}

variable "regions_file" {
  description = "Path of the regions.yaml that describes the fleet: regions, replicas, accelerators, limits, policy."
  type        = string
  validation {
    condition     = fileexists(var.regions_file)
    error_message = "regions_file: there is no such file."
  }
  validation {
    condition     = can(yamldecode(file(var.regions_file)).proxy.region) && can(yamldecode(file(var.regions_file)).replicas[0].name)
    error_message = "regions_file: expected proxy.region and at least one of replicas; `gorgo check` says more."
  }
}

variable "places" {
  description = "The cloud's region for each region of regions.yaml, such as us-ashburn = \"us-east-1\"."
  type        = map(string)
  validation {
    condition     = alltrue([for place in values(var.places) : can(regex("^[a-z]{2,3}(-[a-z]+)+-[0-9]$", place))])
    error_message = "places: expected names of regions as the cloud spells them, such as us-east-1."
  }
  validation {
    condition     = length(distinct(values(var.places))) == length(var.places)
    error_message = "places: two regions in one place; make them one region of regions.yaml."
  }
}

variable "instance_catalog" {
  description = "Instance types by accelerator, least first: the smallest that has the GPUs of one replica is taken."
  type        = map(list(object({ type = string, gpus = number })))
  default = {
    L40S = [{ type = "g6e.2xlarge", gpus = 1 }, { type = "g6e.12xlarge", gpus = 4 }, { type = "g6e.48xlarge", gpus = 8 }]
    L4   = [{ type = "g6.2xlarge", gpus = 1 }, { type = "g6.12xlarge", gpus = 4 }, { type = "g6.48xlarge", gpus = 8 }]
    H100 = [{ type = "p5.4xlarge", gpus = 1 }, { type = "p5.48xlarge", gpus = 8 }]
  }
  validation {
    condition     = alltrue(flatten([for types in values(var.instance_catalog) : [for one in types : one.gpus >= 1]]))
    error_message = "instance_catalog: an instance has at least one GPU."
  }
}

variable "share_instances" {
  description = "Put as many replicas of a region on an instance as its GPUs allow, instead of one each."
  type        = bool
  default     = true
}

variable "grouped" {
  description = "Instances belong to groups that replace them: a new one takes the address once its engines answer."
  type        = bool
  default     = false
}

variable "base_cidr" {
  description = "IPv4 network of the whole fleet, a /12: each region gets a /16 of it, in the order of regions.yaml."
  type        = string
  default     = "10.64.0.0/12"
  validation {
    condition     = can(cidrhost(var.base_cidr, 0)) && endswith(var.base_cidr, "/12")
    error_message = "base_cidr: expected an IPv4 network of the form a.b.0.0/12."
  }
}

variable "model" {
  description = "What the replicas serve: repository on Hugging Face, revision (a commit; null is the newest), served name, context length in tokens."
  type = object({
    repository     = string
    revision       = optional(string)
    served_name    = string
    context_length = optional(number, 32768)
  })
  validation {
    condition     = can(regex("^[A-Za-z0-9._-]+/[A-Za-z0-9._-]+$", var.model.repository))
    error_message = "model.repository: expected owner/name."
  }
  validation {
    condition     = var.model.revision == null || can(regex("^[0-9a-f]{40}$", var.model.revision))
    error_message = "model.revision: expected a commit of 40 hex digits, or null."
  }
  validation {
    condition     = can(regex("^[A-Za-z0-9._/-]{1,128}$", var.model.served_name))
    error_message = "model.served_name: expected letters, digits and . _ / -."
  }
  validation {
    condition     = var.model.context_length >= 1024 && floor(var.model.context_length) == var.model.context_length
    error_message = "model.context_length: expected a whole number of tokens, at least 1024."
  }
}

variable "engine_image" {
  description = "SGLang's container image, pinned by digest: name@sha256:digest; by name:version only with engine_image_by_tag."
  type        = string
  validation {
    condition     = can(regex("^[a-z0-9./-]+(:[A-Za-z0-9_.-]*[0-9][A-Za-z0-9_.-]*)?(@sha256:[0-9a-f]{64})?$", var.engine_image)) && can(regex("[:@]", var.engine_image))
    error_message = "engine_image: expected name@sha256:digest, or name:version with engine_image_by_tag; a tag without a number, as `latest`, is not pinned."
  }
  validation {
    condition     = var.engine_image_by_tag || can(regex("@sha256:", var.engine_image))
    error_message = "engine_image: expected name@sha256:digest, because whoever may push can move a tag; `docker buildx imagetools inspect NAME:TAG` prints the digest. engine_image_by_tag = true allows a tag."
  }
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
  validation {
    condition     = alltrue([for word in var.engine_arguments : can(regex("^[A-Za-z0-9._=/:,-]+$", word))])
    error_message = "engine_arguments: expected words of letters, digits and . _ = / : , - (they go into a systemd unit)."
  }
}

variable "secrets" {
  description = "Where the secrets are: prefix of their names in the secret store, and the cloud region of that store (null: the router's)."
  type = object({
    prefix = string
    place  = optional(string)
  })
  validation {
    condition     = can(regex("^(/[A-Za-z0-9_.-]+)+$", var.secrets.prefix))
    error_message = "secrets.prefix: expected a path such as /gorgo/paper."
  }
}

variable "server_name" {
  description = "DNS name of the router, as in its TLS certificate."
  type        = string
  validation {
    condition     = can(regex("^([a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?\\.)+[a-z]{2,63}$", var.server_name))
    error_message = "server_name: expected a full DNS name in lower case, such as llm.example.org."
  }
}

variable "metrics_cidrs" {
  description = "IPv4 networks that may read /metrics; none by default."
  type        = list(string)
  default     = []
  validation {
    condition     = alltrue([for cidr in var.metrics_cidrs : can(cidrnetmask(cidr)) && !endswith(cidr, "/0")])
    error_message = "metrics_cidrs: expected IPv4 networks, and not the whole internet."
  }
}

variable "package" {
  description = "GORGO's wheel: its file name, its SHA-256 in hex, and the SHA-256 of the lock file that goes with it."
  type = object({
    wheel       = string
    sha256      = string
    lock_sha256 = string
  })
  validation {
    condition     = can(regex("^gorgo_router-[0-9][A-Za-z0-9._+]*-py3-none-any\\.whl$", var.package.wheel))
    error_message = "package.wheel: expected the name of a wheel as `python -m build` makes it, gorgo_router-VERSION-py3-none-any.whl."
  }
  validation {
    condition     = can(regex("^[0-9a-f]{64}$", var.package.sha256)) && can(regex("^[0-9a-f]{64}$", var.package.lock_sha256))
    error_message = "package.sha256, package.lock_sha256: expected 64 hex digits."
  }
}

variable "artefacts" {
  description = "Address of the store from which the router fetches wheel and configuration, such as s3://bucket."
  type        = string
  validation {
    condition     = can(regex("^s3://[a-z0-9][a-z0-9.-]+$", var.artefacts))
    error_message = "artefacts: expected s3://bucket."
  }
}

variable "tuner" {
  description = "Whether `gorgo tune` runs beside the proxy, and how."
  type = object({
    enabled   = optional(bool, true)
    algorithm = optional(string, "es")
    mode      = optional(string, "switchback")
  })
  default = {}
  validation {
    condition     = contains(["es", "cma", "random", "fixed"], var.tuner.algorithm)
    error_message = "tuner.algorithm: expected es, cma, random or fixed."
  }
  validation {
    condition     = contains(["switchback", "paper"], var.tuner.mode)
    error_message = "tuner.mode: expected switchback or paper."
  }
}

variable "store" {
  description = "Whether the routers report to each other in a store, and its DNS name, which may be known later."
  type        = object({ enabled = optional(bool, false), address = optional(string) })
  default     = {}
}

variable "routers" {
  description = "Routers behind one address; without a store each learns alone."
  type        = number
  default     = 1
  validation {
    condition     = contains([1, 2], var.routers)
    error_message = "routers: expected 1 or 2."
  }
}
