"""torchvision, without any operator."""

__version__ = "@torchvision@"
