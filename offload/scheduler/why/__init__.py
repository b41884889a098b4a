"""Why requests were given what they were given."""
