"""Processes of our own: started, watched, stopped, and never left behind."""
