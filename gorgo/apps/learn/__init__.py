"""`gorgo learn`: a model for a policy that learns, from an outcome log."""
