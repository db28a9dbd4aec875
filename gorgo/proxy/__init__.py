"""The regional proxy: the shell that moves bytes between clients and replicas."""
