"""Tools that agents call: one protocol, a pool that bounds what a tool may cost, and the tools that ship."""
