"""Fleet sources at work: requests to API servers and DNS, and the changes of the fleet that they cause."""
