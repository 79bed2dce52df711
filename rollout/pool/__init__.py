"""All engines of a policy as one: which request goes where, what becomes of a lost engine, Ray."""
