"""Network: links, connections and remote replicas in virtual time."""
