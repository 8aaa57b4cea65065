"""The learn page: `contents` lists the chapters, `chapters` draw what `maths` compute by calling the engine.

No chapter holds attention, a pattern or a count of its own: the pictures are the engine's, at a size that fits on a
blackboard.
"""
