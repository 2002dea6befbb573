"""The local stack: broker, services, and their life and death."""
