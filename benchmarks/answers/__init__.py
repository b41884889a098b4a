"""Are answers stored where they come back, and only there?"""
