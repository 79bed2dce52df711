"""All engines of a policy behind one interface: dispatch of requests, recovery of lost engines, Ray."""
