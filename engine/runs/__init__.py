"""Whole-model runs over one prompt: captured, answered, inspected, evaluated."""
