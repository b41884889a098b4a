"""What a tier costs the scheduler, and how soon it is known again."""
