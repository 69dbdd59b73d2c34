"""The libraries above HIP, their host code."""
