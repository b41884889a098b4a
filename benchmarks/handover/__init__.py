"""How soon a prompt that one engine computes is decoded on another; see ``__main__``."""
