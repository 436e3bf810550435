"""Ceilings: how fast this host moves bytes and multiplies, measured."""
