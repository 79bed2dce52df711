"""New weights for running engines: sharding, transport, checksums."""
