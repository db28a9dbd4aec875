"""`gorgo status`: tables and live updates."""
