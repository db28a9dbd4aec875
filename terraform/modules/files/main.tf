# Files on the machine that runs terraform: written by apply, removed by destroy.

variable "folder" {
  description = "Where they go; made if it is not there."
  type        = string
}

variable "texts" {
  description = "Texts by file name."
  type        = map(string)
  validation {
    condition     = alltrue([for name in keys(var.texts) : can(regex("^[A-Za-z0-9][A-Za-z0-9._-]*$", name))])
    error_message = "texts: expected plain file names."
  }
}

resource "terraform_data" "file" {
  for_each         = var.texts
  input            = { folder = var.folder, name = each.key }
  triggers_replace = [var.folder, each.key, each.value]

  provisioner "local-exec" {
    command     = "mkdir -p \"$FOLDER\" && printf '%s' \"$TEXT\" > \"$FOLDER/.$NAME.new\" && mv -f \"$FOLDER/.$NAME.new\" \"$FOLDER/$NAME\""
    environment = { FOLDER = var.folder, NAME = each.key, TEXT = each.value }
    quiet       = true
  }

  provisioner "local-exec" {
    when        = destroy
    command     = "rm -f \"$FOLDER/$NAME\""
    environment = { FOLDER = self.input.folder, NAME = self.input.name }
    quiet       = true
  }
}

output "paths" {
  description = "Paths of the files by name."
  value       = { for name in keys(var.texts) : name => "${var.folder}/${name}" }
}
