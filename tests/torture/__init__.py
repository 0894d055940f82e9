"""Runs killed at random moments, resumed, and compared with an uninterrupted run."""
