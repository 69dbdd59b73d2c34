"""warmstart: slim vLLM images for AMD GPUs, one per GPU architecture, that start warm."""

__version__ = "0.1.0"
