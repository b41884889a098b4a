"""How soon a document on a disk is on the GPU; see ``__main__``."""
