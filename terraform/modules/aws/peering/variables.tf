variable "name" {
  description = "Name of the link."
  type        = string
}

variable "router" {
  description = "The router's side: the VPC, its address range, the route table of its public subnet."
  type        = object({ vpc_id = string, cidr = string, public_route_table_id = string })
}

variable "replicas" {
  description = "The replicas' side: the VPC, its address range, the route table of its private subnet."
  type        = object({ vpc_id = string, cidr = string, private_route_table_id = string })
}

variable "replicas_place" {
  description = "The cloud's region of the replicas' side."
  type        = string
}
