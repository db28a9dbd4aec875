"""Programs made of the layers below: engine server, replay, demo, data sets."""
