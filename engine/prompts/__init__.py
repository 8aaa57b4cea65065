"""Prompts: their texts, what is made to be retrieved from them, and their token ids."""
