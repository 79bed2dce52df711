"""Transfer of new weights to running engines: sharding, transport, checksums."""
