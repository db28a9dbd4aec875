"""Messages: the records that cross the Router's border."""
