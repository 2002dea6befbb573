"""A running cell, a load on it, and a seeded schedule of faults; at the end the accounts must be even."""
