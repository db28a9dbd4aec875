"""The tuner: learns the weights of the cost from live traffic. Reaches a proxy over HTTP only."""
