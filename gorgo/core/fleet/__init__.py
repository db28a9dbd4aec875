"""Fleet: the replicas, their health state, and the columns that policies read."""
