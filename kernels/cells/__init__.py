"""What an index is as tables, which cells it holds and how many, and the float64 reference: no kernel, no choice."""
