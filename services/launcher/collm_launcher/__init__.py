"""Decides which replicas fall idle, and runs federated rounds over them."""
