"""Is an engine with us at least as fast as one without, whatever the link and the GPU?"""
