"""Timing: kernels against torch's own attention, whole prefills, the index's sampling, the search itself."""
