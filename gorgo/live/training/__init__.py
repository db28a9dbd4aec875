"""Training of the policy that learns, beside the event loop: one process, the model file, and the adoption."""
