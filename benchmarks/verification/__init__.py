"""What do checksums cost: sealing slots when a store ends, verifying blocks when a load brings them up?"""
