"""What moves the bytes of places below the pool, on a worker: one medium per kind of place."""
