"""Things that run: the reference runtime, the load client, and servers under test."""
