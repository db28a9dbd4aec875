"""What a learned policy trains on: features of candidates, outcomes of attempts, the training's settings, a model."""
