"""Tools that agents call: the protocol, a pool that enforces limits, and the built-in tools."""
