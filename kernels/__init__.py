"""Attention kernels and the tables they read: torch (CPU), Triton, Gluon and a float64 reference."""
