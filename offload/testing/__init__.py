"""The testing kit: a virtual engine, and copiers that are faulty, paced or immediate on purpose."""
