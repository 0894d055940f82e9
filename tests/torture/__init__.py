"""Runs that are killed at random moments, resumed, and compared with the run that nobody killed."""
