"""The campaign: samples in, actions out. Sans-IO; the sidecar and the twin are its shells."""
