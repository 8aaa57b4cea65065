"""From patterns to an index, and attention over it."""
