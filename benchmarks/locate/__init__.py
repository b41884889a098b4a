"""What it costs to ask an engine how much of a prompt it has."""
