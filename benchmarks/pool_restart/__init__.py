"""How soon a pool that outlived its engine is known again."""
