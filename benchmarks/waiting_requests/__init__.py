"""What do requests that wait for a prefix on its way cost each engine step?"""
