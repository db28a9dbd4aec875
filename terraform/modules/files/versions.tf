# No provider: the `local` one would be a dependency for what a shell does in a line.
terraform {
  required_version = ">= 1.9"
}
