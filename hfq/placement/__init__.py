"""Device maps, and the placement that they give every tensor, in bytes."""
