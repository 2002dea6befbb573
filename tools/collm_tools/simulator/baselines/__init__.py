"""Rivals of the live dispatcher, each after its own paper, behind the same interface."""
