"""Bytes: the worker's side. It carries out orders and decides nothing. No scheduler."""
