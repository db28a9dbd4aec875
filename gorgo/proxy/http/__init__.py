"""HTTP: CORS, and the responses of the data listener."""
