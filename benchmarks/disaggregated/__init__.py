"""Decodes beside prefills, on one engine and on several that hand KV over; see ``__main__``."""
