"""The pattern families of a head, one a file."""
