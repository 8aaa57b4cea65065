"""Attention, index and measurement in plain torch: runs anywhere, and says what the other implementations mean."""
