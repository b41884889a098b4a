"""What does it cost a step when the pool is made smaller, or larger?"""
