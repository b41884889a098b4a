"""What is said at an engine's door: by peers, and by those that only ask where prompts are. No torch."""
