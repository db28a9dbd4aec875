"""Commands that measure routers and policies, live or simulated, and their data and results."""
