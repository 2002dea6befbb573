"""Decisions of the dispatcher: pure functions and plain state, no I/O, no clock."""
