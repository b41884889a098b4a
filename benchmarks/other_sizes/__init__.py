"""What do requests cost that leave a document at many places, and what is left of that when they are gone?"""
