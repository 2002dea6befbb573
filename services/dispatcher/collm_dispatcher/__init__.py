"""OpenAI-compatible ingress and the loop that paces requests into replicas."""
