"""What every room of the engine uses: errors, files, memory, versions. Knows nothing of attention."""
