"""How whoever runs engines talks to them: a socket of each, and the command's end of it."""
