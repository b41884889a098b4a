"""What does a connector cost where it cannot help? Two engines alive at once, taking turns."""
