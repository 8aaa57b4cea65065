"""The files that the engine reads and writes: head configs, config sets, host profiles, other tools' configs."""
