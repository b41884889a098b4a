"""Everything that imports vLLM: the connector's two sides, what they tell each other, and the checks."""
