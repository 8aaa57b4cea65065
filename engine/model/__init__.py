"""Loading a model, and putting sparse prefill into it and out again."""
