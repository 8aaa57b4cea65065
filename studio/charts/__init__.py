"""Figures as pure functions of data."""
