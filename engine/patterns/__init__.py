"""The pattern families of a head, one a file, with everything that the rest of headscope asks of a family."""
