"""flash_attn, without any operator."""

__version__ = "2.8.3"
