"""The status page of the admin listener, and the status that it and `gorgo status` show."""
