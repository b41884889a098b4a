"""The hazard policy for vLLM's own OffloadingConnector."""
