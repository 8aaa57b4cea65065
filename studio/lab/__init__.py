"""What one process holds for all sessions: the device and its worker, models, captures, runs, measurements, drafts."""
