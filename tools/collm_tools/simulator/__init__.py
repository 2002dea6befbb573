"""A cell in virtual time: the live policies on simulated replicas, from completion to completion."""
