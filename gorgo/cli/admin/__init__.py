"""Commands that call the admin listener of a running proxy: status, freeze, unfreeze."""
