"""The chapters of the learn page, one a file: each draws the results of its namesake in `maths` and shows them."""
