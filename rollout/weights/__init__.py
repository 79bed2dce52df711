"""New weights into running engines: how they are cut, how they travel, what their checksums are."""
