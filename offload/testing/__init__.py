"""The testing kit: engines virtual, in memory or real, and copiers that are faulty, paced or immediate."""
