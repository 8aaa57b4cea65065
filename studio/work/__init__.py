"""What the studio does, free of streamlit: sessions' drafts, jobs on the device, measurements kept."""
