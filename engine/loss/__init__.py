"""What a head loses under a pattern, and where the loss comes from."""
