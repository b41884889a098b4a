"""How long does a garbage collection stop the engine for our bookkeeping, and how much memory has a slot?"""
