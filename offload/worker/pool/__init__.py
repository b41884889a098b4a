"""The memory of the CPU pool: its mapping, its pages, its NUMA node, its limits."""
