"""Control: durable changes of weights, policy, freeze and drain at run time."""
