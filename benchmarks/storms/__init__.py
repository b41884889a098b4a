"""What does it cost a step when hundreds of thousands of slots change at once?"""
