"""The chapters of the learn page, one a file.

A chapter turns sliders into frozen results by calling the engine, draws those, and shows them. It holds no attention,
pattern or count of its own: the pictures are the engine's, at a size that fits on a blackboard.
"""
