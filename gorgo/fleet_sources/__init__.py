"""Fleet sources: documents of Kubernetes and answers of DNS to the replicas of a fleet. Pure; a shell fetches them."""
