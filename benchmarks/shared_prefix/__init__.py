"""How long does a request wait for a prefix that is already on its way up for another one?"""
