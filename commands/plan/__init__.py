"""`marsrl plan`: will a run fit, and how long is a step? By formula, before a GPU is touched."""
