"""The way of one router to one replica: connections, probes and scrapes."""
