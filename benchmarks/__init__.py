"""Measurements of the CPU KV-cache tier: one runnable file per question, `report` shared by all."""
