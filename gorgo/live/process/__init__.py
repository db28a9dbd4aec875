"""A process with a Router: what every front end runs beside its own listener, from start to stop."""
