"""Attention and maps in Gluon for Hopper (sm_90a); the index is the Triton one."""
