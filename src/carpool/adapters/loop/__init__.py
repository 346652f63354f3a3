"""Loops of the user's own."""
