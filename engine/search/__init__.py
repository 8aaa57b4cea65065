"""Measuring heads under many candidates, and choosing a head config from the results."""
