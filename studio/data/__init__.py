"""Plain data of a session: its prompts, its draft and how that is edited, what was measured and drawn of it."""
