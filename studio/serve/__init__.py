"""Starting the app."""
